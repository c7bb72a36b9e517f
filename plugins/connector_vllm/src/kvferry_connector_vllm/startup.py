"""From vLLM's configuration to an open side of kvferry, with every check on the way."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvferry.runtime import (
    ConfigSources,
    EngineDescription,
    HostEnvironment,
    LoadMode,
    Prepared,
    SavingOptions,
    find_config,
    namespace,
    new_chain_factory,
    open_scheduler,
    open_worker,
    prepare,
)
from kvferry_connector_vllm.engine import (
    async_loads_because,
    engine_facts,
    geometry,
    group_shapes,
    model_identity,
    rank_block_bytes,
    unsupported,
)
from kvferry_connector_vllm.logs import follow_vllm
from kvferry_connector_vllm.options import VLLMConnectorOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvferry.runtime import (
        Config,
        EngineGroup,
        Fact,
        KeyChain,
        LoRAIdentity,
        SchedulerRuntime,
        WorkerRuntime,
    )

logger = logging.getLogger(__name__)

SPEC_NAME = "vllm"


class Startup:
    """One role's way up. Nothing happens before :meth:`check`, which both roles call first."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._prepared: Prepared | None = None
        self._new_chain: Callable[[str, LoRAIdentity | None], KeyChain] | None = None
        self.unsupported = unsupported(vllm_config, kv_cache_config)
        """Why nothing of this model is cached, or None."""
        self.rank = vllm_config.parallel_config.rank
        published = vllm_config.kv_events_config
        self.events = published is not None and published.enable_kv_cache_events
        """Whether vLLM publishes KV cache events."""

    def check(self) -> Prepared:
        """Read the configuration, load the plugins, run the rules.

        Raises :class:`kvferry.api.KVFerryError` with the text that ``kvferry check`` prints.
        """
        if self._prepared is None:
            transfer = self._vllm_config.kv_transfer_config
            assert transfer is not None
            extra = transfer.kv_connector_extra_config
            environment = dict(os.environ)
            self._prepared = prepare(
                ConfigSources(file=find_config(environment, extra), environment=environment, overrides=extra),
                HostEnvironment(variables=environment),
                self._facts,
                connector=SPEC_NAME,
            )
            modules = [record.module for record in self._prepared.plugins.records if record.listed]
            follow_vllm({"kvferry", *(module.partition(".")[0] for module in modules if module)})
        return self._prepared

    def open_scheduler(self) -> SchedulerRuntime | None:
        """The scheduler side, or None for a model that kvferry cannot serve."""
        prepared = self.check()
        notices = prepared.examination.notices()
        if notices:
            logger.warning("kvferry:\n%s", notices)
        if self.unsupported is not None:
            logger.warning("kvferry: %s; nothing is cached and nothing changes", self.unsupported)
            return None
        space = namespace(
            prepared.config,
            model_identity(self._vllm_config),
            self._vllm_config.model_config.revision or "",
            geometry(self._vllm_config, self._kv_cache_config, prepared.config.chunk_tokens),
        )
        self._new_chain = new_chain_factory(space)
        return open_scheduler(
            prepared.config, prepared.plugins, self._description(), self._saving(), os.environ, space
        )

    def open_worker(self, groups: Sequence[EngineGroup]) -> WorkerRuntime:
        """This rank's side over the memory that vLLM registered."""
        prepared = self.check()
        return open_worker(
            prepared.config,
            prepared.plugins,
            self._description(),
            self._saving(),
            os.environ,
            rank=self.rank,
            groups=groups,
        )

    def new_chain(self, salt: str, lora: LoRAIdentity | None) -> KeyChain:
        assert self._new_chain is not None, "open_scheduler() was not called"
        return self._new_chain(salt, lora)

    def _load_mode(self) -> LoadMode:
        if async_loads_because(self._vllm_config, self._kv_cache_config) is not None:
            return LoadMode.ASYNC
        return LoadMode(self._options().load.value)

    def _options(self) -> VLLMConnectorOptions:
        options = self.check().config.connector.options
        assert isinstance(options, VLLMConnectorOptions)
        return options

    def _saving(self) -> SavingOptions:
        options = self._options()
        return SavingOptions(
            load=self._load_mode(),
            save_generated=options.save_generated,
            verify=options.verify,
            events=self.events,
        )

    def _description(self) -> EngineDescription:
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        parallel = self._vllm_config.parallel_config
        return EngineDescription(
            engine_id=transfer.engine_id,
            world_size=parallel.world_size,
            groups=group_shapes(self._kv_cache_config),
            block_bytes=rank_block_bytes(self._kv_cache_config),
            # vLLM sets the rank back to 0 where its engines share nothing; the index stays.
            data_parallel_rank=getattr(parallel, "data_parallel_index", parallel.data_parallel_rank),
        )

    def _facts(self, config: Config) -> Iterable[Fact]:
        return engine_facts(self._vllm_config, self._kv_cache_config, config.chunk_tokens, _outer_policy())


def _outer_policy() -> str | None:
    """The load-failure policy of the whole engine, where vLLM lets it be seen (in workers)."""
    from vllm.config import get_current_vllm_config_or_none

    outer = get_current_vllm_config_or_none()
    if outer is None or outer.kv_transfer_config is None:
        return None
    return str(outer.kv_transfer_config.kv_load_failure_policy)
