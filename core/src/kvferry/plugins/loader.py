"""Loading: names select, gates judge, one bad plugin is one row."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence

from attrs import evolve
from packaging.utils import canonicalize_name

from kvferry import __version__
from kvferry.api import Manifest
from kvferry.compat import OwnedFactSpec, OwnedRule
from kvferry.compat.guard import Raised, call_foreign
from kvferry.plugins.descriptions import Descriptions, describe
from kvferry.plugins.discovery import (
    Candidate,
    DistributionSource,
    discover,
    installed_distributions,
)
from kvferry.plugins.entrymodule import Clocks, forget_modules, import_entry_module
from kvferry.plugins.gates import CORE_DISTRIBUTION, check_manifest, check_metadata, read_manifest
from kvferry.plugins.hints import closest, did_you_mean, one_of
from kvferry.plugins.hookcalls import HookCalls
from kvferry.plugins.hookcheck import hook_faults, hook_functions
from kvferry.plugins.loaded import LoadedPlugins, OwnedSpec
from kvferry.plugins.records import PluginRecord, PluginRequest, PluginState
from kvferry.plugins.refusal import Refusal
from kvferry.plugins.remedies import UPGRADE, mend

BUILTIN_NAME = "core"


def load_plugins(
    requests: Iterable[PluginRequest],
    *,
    distributions: DistributionSource = installed_distributions,
    core_version: str = __version__,
    clocks: Clocks | None = None,
) -> LoadedPlugins:
    """Import and judge the requested plugins, in this order, and nothing else that is installed.

    Never raises for a plugin's sake: see :meth:`LoadedPlugins.faults`. The built-in plugin ``core``
    is always there and comes first. ``distributions`` is called once. A plugin that is refused leaves
    nothing registered and none of its own modules loaded, so a later call sees what was mended since.
    """
    # Python remembers what folders held, and a plugin may have been installed or mended meanwhile.
    importlib.invalidate_caches()
    loading = _Loading(discover(distributions()), core_version, clocks or Clocks())
    loading.load_builtin()
    for request in requests:
        loading.load(request)
    return loading.finish()


class _Loading:
    """State of one run of the loader."""

    def __init__(self, candidates: Sequence[Candidate], core_version: str, clocks: Clocks) -> None:
        self._candidates = candidates
        self._core_version = core_version
        self._clocks = clocks
        self._hooks = HookCalls()
        self._records: list[PluginRecord] = []
        self._specs: dict[tuple[str, str], OwnedSpec] = {}
        self._rules: list[OwnedRule] = []
        self._fact_specs: list[OwnedFactSpec] = []
        self._prefixes: dict[str, str] = {}

    def load_builtin(self) -> None:
        candidate = Candidate(
            name=BUILTIN_NAME,
            module="kvferry.plugins.builtin",
            distribution=CORE_DISTRIBUTION,
            version=self._core_version,
        )
        request = PluginRequest(name=BUILTIN_NAME, origin="built in")
        self._records.append(self._judge(request, candidate))

    def load(self, request: PluginRequest) -> None:
        try:
            candidate = self._choose(request)
        except Refusal as refusal:
            owners = self._named(request.name)
            self._records.append(_refused(request, refusal, owners))
            return
        self._records.append(self._judge(request, candidate))

    def finish(self) -> LoadedPlugins:
        listed = {record.name for record in self._records}
        rest = sorted({each.name for each in self._candidates} - listed)
        return LoadedPlugins(
            records=(*self._records, *(self._unlisted(name) for name in rest)),
            specs=self._specs,
            rules=tuple(self._rules),
            fact_specs=tuple(self._fact_specs),
            hooks=self._hooks,
        )

    def _named(self, name: str) -> tuple[Candidate, ...]:
        return tuple(each for each in self._candidates if each.name == name)

    def _choose(self, request: PluginRequest) -> Candidate:
        name = request.name
        if name == BUILTIN_NAME:
            raise Refusal(
                PluginState.CONFLICT,
                "this name belongs to the built-in plugin, which is always there",
                f"remove {name!r} from plugins",
            )
        if any(record.name == name for record in self._records):
            raise Refusal(PluginState.CONFLICT, "it is listed twice", "remove one of the two entries")
        owners = self._named(name)
        if not owners:
            raise self._missing(name)
        wanted = request.distribution
        if wanted is not None:
            chosen = tuple(o for o in owners if _same_distribution(o.distribution, wanted))
            if not chosen:
                raise _not_from(name, wanted, owners)
            owners = chosen
        if len(owners) > 1:
            raise _ambiguous(name, owners)
        return owners[0]

    def _missing(self, name: str) -> Refusal:
        names = [each.name for each in self._candidates]
        reason = f"no installed distribution brings it; installed: {one_of(names)}"
        inside = [each.name for each in self._candidates if _same_distribution(each.distribution, name)]
        if inside:
            reason = "this is the name of a distribution, and plugins are listed by their own names"
            return Refusal(PluginState.MISSING, reason, f"write {' or '.join(inside)}", meant=inside[0])
        # No name of a distribution is made up here: somebody else may own it.
        meant = closest(name, names)
        remedy = did_you_mean(name, names) or "install the distribution that brings it, or correct the name"
        return Refusal(PluginState.MISSING, reason, remedy, meant=meant or "")

    def _judge(self, request: PluginRequest, candidate: Candidate) -> PluginRecord:
        trial = _Trial(request, candidate)
        before = frozenset(sys.modules)
        # The gates look at objects that the plugin made, whose attributes and texts may fail too.
        passed = call_foreign(lambda: self._pass_gates(trial))
        if isinstance(passed, Raised):
            self._hooks.unregister(request.name)
            forget_modules(candidate.module, before)
            error = passed.error
            if isinstance(error, Refusal):
                return _with_refusal(trial.record, error)
            return _with_refusal(
                trial.record,
                Refusal(
                    PluginState.FAILED,
                    f"{candidate.label} failed with {passed}",
                    UPGRADE,
                    error,
                ),
            )
        manifest, described = passed.value
        record = evolve(trial.record, state=PluginState.READY, provides=described.provides)
        self._adopt(record, manifest, described)
        return record

    def _pass_gates(self, trial: _Trial) -> tuple[Manifest, Descriptions]:
        candidate = trial.candidate
        check_metadata(candidate, self._core_version)
        entry = import_entry_module(candidate, self._clocks)
        trial.record = evolve(trial.record, remarks=entry.cost.remarks())
        manifest = read_manifest(candidate, entry.module)
        trial.record = evolve(trial.record, manifest=manifest)
        check_manifest(candidate, manifest)
        faults = hook_faults(entry.module)
        if faults:
            raise Refusal(
                PluginState.FAILED,
                "; ".join(fault.what for fault in faults),
                mend(", ".join(dict.fromkeys(fault.fix for fault in faults))),
            )
        registered = self._hooks.register(candidate.name, hook_functions(entry.module))
        if isinstance(registered, Raised):
            raise Refusal(
                PluginState.FAILED,
                f"its hooks cannot be registered: {registered}",
                UPGRADE,
                registered.error,
            )
        described = describe(self._hooks, candidate.name, manifest.rule_prefix)
        self._check_owners(manifest, described)
        return manifest, described

    def _check_owners(self, manifest: Manifest, described: Descriptions) -> None:
        clashes = []
        for provided in described.provides:
            owner = self._specs.get((provided.kind, provided.name))
            if owner is not None:
                clashes.append(
                    f"{provided} is already provided by plugin '{owner.plugin.name}' "
                    f"({owner.plugin.distribution})"
                )
        rival = self._prefixes.get(manifest.rule_prefix)
        if rival is not None:
            clashes.append(f"the rule prefix {manifest.rule_prefix} already belongs to plugin '{rival}'")
        if clashes:
            raise Refusal(PluginState.CONFLICT, "; ".join(clashes), "list only one of the two plugins")

    def _adopt(self, record: PluginRecord, manifest: Manifest, described: Descriptions) -> None:
        self._prefixes[manifest.rule_prefix] = record.name
        for provided, spec in described.specs:
            owned = OwnedSpec(kind=provided.kind, spec=spec, plugin=record)
            self._specs[provided.kind, provided.name] = owned
        self._rules += [
            OwnedRule(rule=rule, owner=record.name, distribution=record.distribution)
            for rule in described.rules
        ]
        self._fact_specs += [OwnedFactSpec(spec=spec, owner=record.name) for spec in described.fact_specs]

    def _unlisted(self, name: str) -> PluginRecord:
        owners = self._named(name)
        record = PluginRecord(
            name=name,
            state=PluginState.FOUND,
            distributions=tuple(owner.owner for owner in owners),
            module=owners[0].module,
            offers=tuple(offer for owner in owners for offer in owner.offers),
        )
        if len(owners) > 1:
            return _with_refusal(record, _ambiguous(name, owners))
        try:
            check_metadata(owners[0], self._core_version)
        except Refusal as refusal:
            return _with_refusal(record, refusal)
        return record


class _Trial:
    """One plugin on its way through the gates, with what is known of it when a gate refuses it."""

    def __init__(self, request: PluginRequest, candidate: Candidate) -> None:
        self.candidate = candidate
        self.record = PluginRecord(
            name=request.name,
            state=PluginState.FOUND,
            distributions=(candidate.owner,),
            module=candidate.module,
            offers=candidate.offers,
            listed=True,
            required=request.required,
            origin=request.origin,
        )


def _refused(request: PluginRequest, refusal: Refusal, owners: tuple[Candidate, ...]) -> PluginRecord:
    record = PluginRecord(
        name=request.name,
        state=refusal.state,
        distributions=tuple(owner.owner for owner in owners),
        listed=True,
        required=request.required,
        origin=request.origin,
    )
    return _with_refusal(record, refusal)


def _with_refusal(record: PluginRecord, refusal: Refusal) -> PluginRecord:
    return evolve(
        record,
        state=refusal.state,
        reason=refusal.reason,
        remedy=refusal.remedy,
        meant=refusal.meant,
        error=refusal.error,
    )


def _same_distribution(one: str, other: str) -> bool:
    return canonicalize_name(one) == canonicalize_name(other)


def _not_from(name: str, wanted: str, owners: tuple[Candidate, ...]) -> Refusal:
    labels = one_of(owner.label for owner in owners)
    hint = did_you_mean(wanted, [owner.distribution for owner in owners])
    return Refusal(
        PluginState.MISSING,
        f"no installed distribution {wanted!r} brings it; it comes from: {labels}",
        hint or f"write {name}@{owners[0].distribution}, or only {name}",
    )


def _ambiguous(name: str, owners: tuple[Candidate, ...]) -> Refusal:
    distributions = sorted({owner.distribution for owner in owners})
    labels = " and ".join(owner.label for owner in owners)
    if len(distributions) == 1:
        return Refusal(
            PluginState.CONFLICT,
            f"{labels} brings it twice",
            "report it to the author of the distribution",
        )
    choices = " or ".join(f"{name}@{each}" for each in distributions)
    return Refusal(
        PluginState.CONFLICT,
        f"two distributions bring it: {labels}",
        f"uninstall one, or write {choices}",
    )
