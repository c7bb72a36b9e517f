"""``kvferry size``: what a model's KV cache takes, and what fits where."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from .conftest import CommandLine

PAGE = Path(__file__).parents[3] / "docs" / "operators.md"
UPDATE = "KVFERRY_UPDATE_SNAPSHOTS"
FIELDS = PAGE.with_name("check-json.md")
EXAMPLE = re.compile(r"```console\n\$ (kvferry size [^\n]+)\n(.*?)```\n", re.DOTALL)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-32B": {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 5120,
        "torch_dtype": "bfloat16",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "torch_dtype": "bfloat16",
    },
}
REEL = """
    from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

    MANIFEST = Manifest(name="backend_reel", api=">=1.0,<2", rule_prefix="REEL")

    @hookimpl
    def kvferry_backends():
        return [
            BackendSpec(
                name="reel",
                factory="zoo_reel.parts:Backend",
                options="zoo_reel.parts:Options",
                capabilities=BackendCapabilities(persistent=True),
            )
        ]
"""
REEL_PARTS = """
    from attrs import frozen

    class Backend:
        pass

    @frozen
    class Options:
        pass
"""
CONFIG = """\
plugins: [backend_tape, backend_reel]
chunk_tokens: 512
tiers:
  cpu: {use: tape, capacity: 8GiB}
  far: {use: reel, capacity: 100GiB, in_flight: 64MiB}
"""


@pytest.fixture
def models(shell: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A shell in a folder that holds the models, with a backend that is not plain memory."""
    for name, config in MODELS.items():
        shell.write(json.dumps(config), f"{name}/config.json")
    shell.install("kvferry-backend-reel", "backend_reel", "zoo_reel", REEL, REEL_PARTS)
    monkeypatch.chdir(shell.root)
    return shell


def sized(shell: CommandLine, *words: str) -> Any:
    ran = shell.run("size", "--model", "Qwen3-32B", *words, "--format", "json")
    assert ran.err == ""
    assert ran.code == 0
    return ran.json


def test_the_page_shows_what_the_command_prints(models: CommandLine) -> None:
    """Write the page's examples anew with ``KVFERRY_UPDATE_SNAPSHOTS=1``."""
    page = PAGE.read_text(encoding="utf-8")
    examples = EXAMPLE.findall(page)
    assert len(examples) >= 2
    for command, shown in examples:
        ran = models.run(*shlex.split(command)[1:])
        assert ran.code == 0
        if os.environ.get(UPDATE) == "1":
            page = page.replace(f"$ {command}\n{shown}```", f"$ {command}\n{ran.out}```")
            PAGE.write_text(page, encoding="utf-8")
        else:
            assert ran.out == shown


def test_every_field_for_programs_is_described(models: CommandLine) -> None:
    found = sized(models, "--cpu", "1GiB", "--ssd", "2GiB", "--tokens", "1000", "--requests", "3")
    _, _, described = FIELDS.read_text(encoding="utf-8").partition("## `kvferry size --format json`")
    assert described
    names = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", described))))
    assert _keys(found) <= names


def _keys(found: Any) -> set[str]:
    if isinstance(found, list):
        return {key for each in found for key in _keys(each)}
    if not isinstance(found, dict):
        return set()
    return {*found, *(key for each in found.values() for key in _keys(each))}


def test_without_a_tier_the_command_says_what_tokens_take(models: CommandLine) -> None:
    found = sized(models, "--tp", "8")
    assert found["schema"] == 1
    assert found["token_bytes"] == {"rank": 32 << 10, "all": 256 << 10}
    assert found["block_bytes"] == {"rank": 4 << 20, "all": 32 << 20}
    assert found["chunk_bytes"] == {"rank": 8 << 20, "all": 64 << 20}
    assert found["tiers"] == []
    assert found["prompt"] is found["requests"] is found["host"] is None
    text = models.run("size", "--model", "Qwen3-32B", "--tp", "8").out
    assert "TIER" not in text
    assert "host" not in text


def test_the_tiers_of_a_configuration_are_filled_with_its_chunks(models: CommandLine) -> None:
    models.write(CONFIG, "c.yaml")
    found = sized(models, "--tp", "4", "--config", "c.yaml", "--tokens", "1000", "--requests", "200")
    assert found["chunk_tokens"] == 512
    chunk = 512 * 64 << 10
    assert found["chunk_bytes"]["rank"] == chunk
    cpu, far = found["tiers"]
    assert (cpu["name"], cpu["addressable"], cpu["chunks"]) == ("cpu", True, (8 << 30) // chunk)
    assert (far["name"], far["addressable"]) == ("far", False)
    assert far["slot_bytes"] > chunk
    assert far["chunks"] == (100 << 30) // far["slot_bytes"]
    assert cpu["capacity_bytes"] == {"rank": 8 << 30, "all": 32 << 30}
    # 7 whole blocks of 128 tokens: a full chunk and a tail.
    assert found["prompt"]["kept_tokens"] == 896
    assert found["prompt"]["chunks"] == 2
    assert cpu["prompts"] == cpu["chunks"] // 2
    assert [tier["fits"] for tier in found["requests"]["tiers"]] == [False, True]
    assert found["requests"]["bytes"]["rank"] == 200 * 2 * chunk
    assert found["host"]["workers"] == 4
    assert found["host"]["total_bytes"] == 4 * (8 << 30)
    assert found["host"]["in_flight_bytes"] == 128 << 20


def test_the_configuration_may_stand_in_the_environment_and_options_win(models: CommandLine) -> None:
    models.environment["KVFERRY_CONFIG"] = models.write(CONFIG, "c.yaml")
    models.environment["KVFERRY__TIERS__CPU__CAPACITY"] = "2GiB"
    found = sized(models)
    assert [tier["capacity_bytes"]["rank"] for tier in found["tiers"]] == [2 << 30, 100 << 30]
    assert sized(models, "--chunk-tokens", "1024")["chunk_tokens"] == 1024
    named = sized(models, "--cpu", "1GiB")
    assert [tier["name"] for tier in named["tiers"]] == ["cpu"]
    assert named["chunk_tokens"] == 256


def test_the_memory_is_that_of_the_machine_unless_it_is_given(models: CommandLine) -> None:
    models.machine("proc/meminfo", "MemTotal: 8388608 kB\n")
    host = sized(models, "--cpu", "6GiB")["host"]
    assert (host["memory_bytes"], host["share"]) == (8 << 30, 0.75)
    assert "meminfo" in host["memory_origin"]
    host = sized(models, "--cpu", "6GiB", "--memory", "3GiB", "--workers", "2")["host"]
    assert (host["memory_bytes"], host["share"]) == (3 << 30, 4)


@pytest.mark.parametrize(
    ("capacity", "says"),
    [("6GiB", "75 % of 8 GiB"), ("7GiB", "leaves little"), ("9GiB", "more than it has")],
)
def test_the_text_judges_the_budget_of_the_host(models: CommandLine, capacity: str, says: str) -> None:
    models.machine("proc/meminfo", "MemTotal: 8388608 kB\n")
    ran = models.run("size", "--model", "Qwen3-32B", "--cpu", capacity)
    assert ran.code == 0
    assert says in ran.out
    (models.root / "machine/proc/meminfo").unlink()
    assert "could not be found out" in models.run("size", "--model", "Qwen3-32B", "--cpu", capacity).out


def test_a_tier_on_ssd_alone_takes_no_memory(models: CommandLine) -> None:
    assert sized(models, "--ssd", "1GiB")["host"] is None


def test_of_a_prompt_without_a_whole_block_nothing_is_kept(models: CommandLine) -> None:
    words = ("--cpu", "1GiB", "--tokens", "127", "--requests", "5")
    found = sized(models, *words)
    assert found["prompt"]["chunks"] == found["requests"]["bytes"]["rank"] == 0
    assert found["tiers"][0]["prompts"] is None
    assert "nothing of them is kept" in models.run("size", "--model", "Qwen3-32B", *words).out


@pytest.mark.parametrize("columns", [40, 80])
def test_sentences_keep_to_the_width_of_a_terminal(models: CommandLine, columns: int) -> None:
    models.columns = columns
    words = ("--cpu", "16GiB", "--ssd", "2TiB", "--tokens", "1000", "--requests", "5")
    ran = models.run("size", "--model", "Qwen3-32B", "--tp", "8", *words)
    rows = ("TIER", "cpu", "ssd", "token", "block", "chunk", "       TOKENS")
    sentences = [line for line in ran.out.splitlines() if not line.startswith(rows)]
    assert len(sentences) > 8
    assert max(map(len, sentences)) <= columns


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "missing"], "No such file"),
        (["--model", "none.json"], "it is not JSON"),
        (["--model", "empty.json"], "num_hidden_layers is missing"),
        (["--dtype", "bf16"], "did you mean bfloat16"),
        (["--tp", "3"], "cannot be shared by 3 ranks"),
        (["--tp", "0"], "'0' is not a whole number"),
        (["--tp", "²"], "is not a whole number"),
        (["--tp", "9" * 5000], "is not a whole number"),
        (["--block-tokens", "-1"], "'-1' is not a whole number"),
        (["--chunk-tokens", "200"], "a chunk of 200 tokens is not whole blocks of 128"),
        (["--requests", "4"], "without --tokens"),
        (["--tokens", "many"], "'many' is not a whole number"),
        (["--cpu", "16"], "a size needs a unit"),
        (["--ssd", "0B"], "nothing"),
        (["--cpu", "1GiB", "--memory", "lots"], "not a size"),
        (["--cpu", "1GiB", "--config", "c.yaml"], "exclude each other"),
    ],
)
def test_what_has_no_size_is_one_clear_error(models: CommandLine, words: list[str], says: str) -> None:
    models.write("{", "none.json")
    models.write("{}", "empty.json")
    ran = models.run("size", *([] if "--model" in words else ["--model", "Qwen3-32B"]), *words)
    assert ran.code == 2
    assert ran.out == ""
    assert says in ran.err
    first, why, fix = ran.err.splitlines()
    assert ": " in first
    assert why.startswith("  why  ")
    assert fix.startswith("  fix  ")


def test_a_configuration_with_faults_fills_nothing(models: CommandLine) -> None:
    models.write(CONFIG.replace("8GiB", "8"), "c.yaml")
    ran = models.run("size", "--model", "Qwen3-32B", "--config", "c.yaml")
    assert ran.code == 2
    assert ran.out == ""
    assert "c.yaml:4:" in ran.err


def test_plugins_that_are_not_here_and_hold_no_chunks_are_told_and_nothing_more(models: CommandLine) -> None:
    """A file for an engine is sized on a machine without one."""
    models.write(CONFIG.replace("reel]", "reel, connector_vllm]"), "c.yaml")
    ran = models.run("size", "--model", "Qwen3-32B", "--config", "c.yaml")
    assert ran.code == 4
    assert "far" in ran.out
    assert "connector_vllm" in ran.err
