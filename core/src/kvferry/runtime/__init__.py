"""What hosts of kvferry build on: open one side of an engine, then drive it step by step."""

from kvferry.api import Fact, HostEnvironment, KVFerryError
from kvferry.config import Config, ConfigSources, find_config
from kvferry.control.identity import LoRAIdentity
from kvferry.control.keys import KeyChain, MediaItem
from kvferry.control.lower import LowerTierReport
from kvferry.data.engine_side import EngineGroup, PagePlane
from kvferry.data.meter import TierStatistics
from kvferry.data.plans import StepPlan, Transfer
from kvferry.runtime.engine import (
    EngineDescription,
    SavingOptions,
    namespace,
    new_chain_factory,
    open_scheduler,
    open_worker,
)
from kvferry.runtime.events import CacheEvent, ForgetAll, RemovedChunks, StoredRun
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.requests import LoadMode, PinRequest, RequestOptions, RequestState
from kvferry.runtime.scheduler import SchedulerRuntime
from kvferry.runtime.sharing_statistics import SharingState, SharingStatistics
from kvferry.runtime.startup import Prepared, prepare
from kvferry.runtime.waits import LowerStatistics
from kvferry.runtime.worker import StepReport, WorkerRuntime

__all__ = [
    "CacheEvent",
    "Config",
    "ConfigSources",
    "EngineDescription",
    "EngineGroup",
    "Fact",
    "ForgetAll",
    "GroupShape",
    "HostEnvironment",
    "KVFerryError",
    "KeyChain",
    "LoRAIdentity",
    "LoadMode",
    "LowerStatistics",
    "LowerTierReport",
    "MediaItem",
    "PagePlane",
    "PinRequest",
    "Prepared",
    "RemovedChunks",
    "RequestOptions",
    "RequestState",
    "SavingOptions",
    "SchedulerRuntime",
    "SharingState",
    "SharingStatistics",
    "StepPlan",
    "StepReport",
    "StoredRun",
    "TierStatistics",
    "Transfer",
    "WorkerRuntime",
    "find_config",
    "namespace",
    "new_chain_factory",
    "open_scheduler",
    "open_worker",
    "prepare",
]
