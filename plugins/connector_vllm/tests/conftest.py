"""vLLM and torch warn while they are imported; that is theirs to mend, and no test of ours."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.v1.metrics.utils  # noqa: F401
