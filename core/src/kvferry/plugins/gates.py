"""The gates on both sides of the import: what a distribution's metadata and a manifest say."""

from __future__ import annotations

import re
from types import ModuleType

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvferry.api import API_VERSION, Manifest
from kvferry.compat.guard import Raised, call_foreign
from kvferry.compat.validation import RULE_PREFIX
from kvferry.plugins.discovery import Candidate
from kvferry.plugins.records import PluginState
from kvferry.plugins.refusal import Refusal
from kvferry.plugins.remedies import mend

CORE_DISTRIBUTION = "kvferry"
_ABOUT_CORE = re.compile(rf"{CORE_DISTRIBUTION}(?![\w.-])", re.IGNORECASE)


def check_metadata(candidate: Candidate, core_version: str) -> None:
    """Gate 1: what the distribution requires admits this kvferry. Imports nothing.

    Says nothing when the distribution does not require kvferry at all: then the API range decides.
    Raises :class:`Refusal`.
    """
    for line in candidate.requires:
        requirement = _requirement(candidate, line)
        if requirement is None or _admits(requirement.specifier, core_version):
            continue
        raise Refusal(
            PluginState.REJECTED,
            f"{candidate.label} requires {CORE_DISTRIBUTION} {requirement.specifier}, and "
            f"{core_version} is installed",
            f"pip install --upgrade {CORE_DISTRIBUTION} {candidate.distribution}",
        )


def _requirement(candidate: Candidate, line: str) -> Requirement | None:
    """The line when it applies here and is about kvferry, else ``None``."""
    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        if _ABOUT_CORE.match(line.strip()) is None:
            return None
        raise Refusal(
            PluginState.REJECTED,
            f"{candidate.label} has a requirement that cannot be read: {line!r}",
            "reinstall or upgrade the distribution",
            error,
        ) from error
    if canonicalize_name(requirement.name) != CORE_DISTRIBUTION:
        return None
    try:
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    except UndefinedEnvironmentName:
        applies = True
    return requirement if applies else None


def _admits(specifier: SpecifierSet, version: str) -> bool:
    return specifier.contains(version, prereleases=True)


def read_manifest(candidate: Candidate, module: ModuleType) -> Manifest:
    """Gate 3, first half: there is a manifest that can be shown. Raises :class:`Refusal`."""
    found = call_foreign(lambda: getattr(module, "MANIFEST", None))
    manifest = None if isinstance(found, Raised) else found.value
    if not isinstance(manifest, Manifest):
        raise _bad_manifest(
            candidate,
            "has no MANIFEST"
            if manifest is None
            else f"has a MANIFEST of type {type(manifest).__name__}, not kvferry.api.Manifest",
            f"write  MANIFEST = Manifest(name={candidate.name!r}, ...)  into it",
        )
    for name in ("name", "api", "rule_prefix", "summary", "docs"):
        if not isinstance(getattr(manifest, name), str):
            raise _bad_manifest(
                candidate, f"has a MANIFEST whose {name} is not a text", f"make its {name} a text"
            )
    return manifest


def check_manifest(candidate: Candidate, manifest: Manifest) -> None:
    """Gate 3, second half: it is the plugin that it says it is, written for this contract.

    Raises :class:`Refusal`.
    """
    if manifest.name != candidate.name:
        raise _bad_manifest(
            candidate,
            f"calls itself {manifest.name!r} in its MANIFEST, not {candidate.name!r}",
            f"rename it to {candidate.name!r} in the MANIFEST, or the entry point to {manifest.name!r}",
        )
    if RULE_PREFIX.fullmatch(manifest.rule_prefix) is None:
        raise _bad_manifest(
            candidate,
            f"has the rule prefix {manifest.rule_prefix!r}, which is not upper-case letters and "
            "digits that end in a letter",
            "choose another, for example  rule_prefix='ACME'",
        )
    _check_api_range(candidate, manifest)


def _check_api_range(candidate: Candidate, manifest: Manifest) -> None:
    try:
        admitted = SpecifierSet(manifest.api)
    except InvalidSpecifier:
        raise _bad_manifest(
            candidate,
            f"has the API range {manifest.api!r}, which is not a PEP 440 range",
            "write one, for example  api='>=1.0,<2'",
        ) from None
    if not _admits(admitted, API_VERSION):
        newer = _written_for_newer(admitted)
        raise Refusal(
            PluginState.REJECTED,
            f"{candidate.label} is written for the plugin API {manifest.api}, and this kvferry "
            f"offers {API_VERSION}",
            f"pip install --upgrade {CORE_DISTRIBUTION if newer else candidate.distribution}",
        )


def _written_for_newer(admitted: SpecifierSet) -> bool:
    offered = Version(API_VERSION)
    return any(
        clause.operator in (">=", ">", "==", "~=")
        and Version(clause.version.removesuffix(".*")) >= offered
        and not clause.contains(API_VERSION, prereleases=True)
        for clause in admitted
    )


def _bad_manifest(candidate: Candidate, fault: str, fix: str) -> Refusal:
    return Refusal(
        PluginState.FAILED,
        f"the entry module {candidate.module!r} of {candidate.label} {fault}",
        mend(fix),
    )
