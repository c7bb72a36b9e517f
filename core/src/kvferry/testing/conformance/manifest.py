"""What every plugin promises: a light entry module that says who it is."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

import pytest
from packaging.specifiers import SpecifierSet

from kvferry.api import API_VERSION, ENTRY_POINT_GROUP, HostEnvironment, Manifest
from kvferry.config.optioncheck import options_faults
from kvferry.plugins import LoadedPlugins
from kvferry.testing.conformance.base import Conformance
from kvferry.testing.conformance.subject import load_plugin, specs_of
from kvferry.testing.light_imports import measure_import

_INNER = ("kvferry.control", "kvferry.data", "kvferry.runtime")


class ManifestConformance(Conformance, kit=True):
    """For the plugin named ``plugin``, which must be installed."""

    plugin: ClassVar[str]

    @pytest.fixture
    def plugins(self) -> LoadedPlugins:
        """The plugin, loaded as core does it."""
        return load_plugin(self.plugin)

    @pytest.fixture
    def entry_point(self) -> EntryPoint:
        """The plugin's one entry point."""
        found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == self.plugin]
        assert len(found) == 1, f"{len(found)} installed distributions bring the plugin {self.plugin!r}"
        return found[0]

    @pytest.fixture
    def manifest(self, plugins: LoadedPlugins, entry_point: EntryPoint) -> Manifest:
        """What the entry module says."""
        assert plugins.records
        found = sys.modules[entry_point.module].MANIFEST
        assert isinstance(found, Manifest)
        return found

    def test_the_plugin_passes_every_gate(self, plugins: LoadedPlugins) -> None:
        """Core can load the plugin and finds nothing wrong with it."""
        assert plugins.faults() == ()

    def test_the_name_is_the_entry_point_s(self, manifest: Manifest) -> None:
        """The manifest bears the name under which the plugin is listed."""
        assert manifest.name == self.plugin

    def test_the_api_range_has_both_ends(self, manifest: Manifest) -> None:
        """The range holds this contract and does not claim versions that nobody knows yet."""
        allowed = SpecifierSet(manifest.api)
        assert allowed.contains(API_VERSION)
        next_major = f"{int(str(API_VERSION).split('.')[0]) + 1}.0"
        assert not allowed.contains(next_major), f"{manifest.api!r} has no upper end"

    def test_the_summary_says_what_it_is(self, manifest: Manifest) -> None:
        """A list of plugins can say in one line what this one is for."""
        assert manifest.summary.strip()
        assert "\n" not in manifest.summary

    def test_the_entry_module_is_light(self, entry_point: EntryPoint) -> None:
        """Importing the entry module costs little and loads nothing heavy."""
        cost = measure_import(entry_point.module, runs=3)
        assert cost.light, cost

    def test_no_implementation_is_imported_early(
        self, plugins: LoadedPlugins, entry_point: EntryPoint
    ) -> None:
        """What a spec names as its factory is imported only when a configuration selects it, and what
        runs in an engine only there."""
        cost = measure_import(entry_point.module)
        own = specs_of(plugins, self.plugin)
        factories = {str(getattr(owned.spec, "factory", "")).partition(":")[0] for owned in own}
        assert not factories & set(cost.modules)
        assert [name for name in cost.modules if name.startswith(_INNER)] == []

    def test_everything_that_is_named_can_be_imported(self, plugins: LoadedPlugins) -> None:
        """Factories and option classes exist and have the shape that their kind demands."""
        for owned in specs_of(plugins, self.plugin):
            if hasattr(owned.spec, "factory"):
                assert callable(plugins.factory(owned.kind, owned.spec.name))
            plugins.options_class(owned.kind, owned.spec.name)

    def test_a_configuration_can_hold_every_option(self, plugins: LoadedPlugins) -> None:
        """Every field of an options class has a type that a configuration can hold, and a name that is
        not core's."""
        faults = []
        for owned in specs_of(plugins, self.plugin):
            options = plugins.options_class(owned.kind, owned.spec.name)
            if options is not None:
                found = options_faults(options, type(owned.spec))
                faults += [f"{owned.label}: {fault.what}\n  fix  {fault.remedy}" for fault in found]
        assert not faults, "\n".join(faults)

    def test_what_the_metadata_offers_is_what_it_provides(self, plugins: LoadedPlugins) -> None:
        """Entry points ``kind.name = plugin`` of the group ``kvferry.offers``, from which a configuration
        learns that it has to list this plugin, name all that it provides, or none is there at all."""
        (row,) = [record for record in plugins.records if record.listed and record.name == self.plugin]
        offered, provided = set(map(str, row.offers)), set(map(str, row.provides))
        assert offered in (set(), provided), f"offered: {sorted(offered)}, provided: {sorted(provided)}"

    def test_facts_can_be_asked_of_any_machine(self, plugins: LoadedPlugins, tmp_path: object) -> None:
        """Probing a machine that has none of the usual files finds less, and raises nothing."""
        probed = plugins.facts(HostEnvironment(root=str(tmp_path)))
        assert probed.required_faults == ()
