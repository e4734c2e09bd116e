"""diagnose and the doctor: what is wrong is named with its code, and what is right raises no alarm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from installed import ACCELERATE, RELEASE
from ranks import diagnosing_bodies as bodies

import cpcompat
from cpcompat import Finding, Report, diagnose
from cpcompat.codes import CODES
from cpcompat.errors import CPNotRequested
from cpcompat.settings import ConfigUnreadable
from cpcompat.testing import Ranks

HAS_CONFIG = pytest.mark.skipif(not RELEASE.has_config, reason="this accelerate has no ParallelismConfig")
WRAPPERS = ("DDP", "FSDP2") if RELEASE.has_config else ("DDP",)
SWITCH, SIZE = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_CP_SIZE"


def seen(report: Report, *severities: str) -> list[tuple[str, str]]:
    return [(one.severity, one.code) for one in report.findings if one.severity in (severities or ("warning", "error"))]


# --- on an accelerator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_false_alarm_on_a_healthy_llama(ranks2: Ranks, wrapper: str) -> None:
    for found in ranks2.run(bodies.healthy, wrapper == "FSDP2", not RELEASE.has_config):
        assert found["warnings"] == []
        for when, report in found["reports"].items():
            assert seen(report) == [], (when, str(report))
            fine = {code for _, code in seen(report, "ok")}
            if when != "before prepare":
                assert fine >= {"CP101", "CP302", "CP303", "CP304", "CP307"}, str(report)
                assert report.ok
            # A note where another test's module has captured the function, which no model here uses.
            if when != "in the block":
                assert {("ok", "CP305"), ("note", "CP305")} & set(seen(report, "ok", "note"))


# What is wrong, and the finding that says so: code, severity, words of the evidence.
SICK = {
    "no cp": ("CP101", "error", "acc.parallelism_config: None"),
    "sequence parallel": ("CP107", "error", "sp_size 2"),
    "no mesh": ("CP102", "error", "device_mesh is None"),
    "state reset": ("CP104", "error", "distributed_type is gone"),
    "owned": ("CP108", "note", "simpletuner"),
    "not made yet": ("CP403", "warning", "absent: acc._cp_context, acc._context_parallel"),
    "sizes": ("CP109", "error", "dp_shard 4 x cp 2 = 8, and 2 processes"),
    "eager": ("CP304", "error", "model.layers.0.self_attn: eager"),
    "flash": ("CP304", "error", "model.layers.1.self_attn: flash_attention_2"),
    "chunks": ("CP302", "note", "chunked_attention, sees 16 tokens back"),
    "linear attention": ("CP302", "error", "linear_attention"),
    "no hook": ("CP303", "warning", "Sequential: 1"),
    "not causal": ("CP303", "warning", "ModuleDict: self_attn"),
    "dropout": ("CP306", "error", "model.layers.0.self_attn: 0.1"),
    "reentrant": ("CP307", "note", "LlamaForCausalLM"),
    "shuffled": ("CP209", "warning", "a seed that nobody set"),
    "iterable": ("CP209", "warning", "an IterableDataset"),
    "captured": ("CP305", "warning", "somebodys_model.attention"),
    "replaced": ("CP305", "note", "diagnosing_bodies._replaced"),
}


@HAS_CONFIG
@pytest.mark.parametrize("case", SICK)
def test_what_is_wrong_is_named(ranks2: Ranks, case: str) -> None:
    code, severity, words = SICK[case]
    for findings in ranks2.run(bodies.sick, case):
        (evidence,) = [evidence for found, how, evidence in findings if (found, how) == (code, severity)]
        assert words in evidence
        others = [(found, how) for found, how, _ in findings if how != "note" and (found, how) != (code, severity)]
        assert others == ([("CP403", "warning")] if case == "linear attention" else []), "and nothing else is"


@pytest.mark.parametrize("acc", [object(), mock.MagicMock(), 3], ids=lambda acc: type(acc).__name__)
def test_what_is_no_accelerator_is_no_crash(acc: object) -> None:
    assert seen(diagnose(acc)) == [("error", "CP101")]


@HAS_CONFIG
def test_diagnosing_changes_nothing(ranks2: Ranks) -> None:
    for found in ranks2.run(bodies.nothing_is_changed):
        assert set(found.values()) == {True}, found


# --- environment and config file ----------------------------------------------------------------------------------------

GOOD = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2}
num_processes: 8
parallelism_config:
  parallelism_config_dp_shard_size: 4
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
"""

# A change of the file, and the finding of severity error that it leads to.
CONFIGS = {
    "product": (("num_processes: 8", "num_processes: 4"), "CP109", "dp_shard 4 x cp 2 = 8, and 4 processes"),
    "FSDP1": (("fsdp_version: 2", "fsdp_version: 1"), "CP110", "FSDP1"),
    "FSDP of no version": (("{fsdp_version: 2}", "{}"), "CP110", "FSDP1"),
    "no FSDP": (("distributed_type: FSDP", "distributed_type: MULTI_GPU"), "CP110", "none"),
    "DeepSpeed": (("distributed_type: FSDP", "distributed_type: DEEPSPEED"), "CP110", "DeepSpeed"),
    "replicas": (("dp_shard_size", "dp_replicate_size"), "CP109", "dp_replicate 4, cp 2, dp_shard 1"),
    "short name": (("parallelism_config_cp_size", "cp_size"), "CP101", "parallelism_config: cp_size"),
    "at the top": (("parallelism_config:", "cp_size: 2\nparallelism_config:"), "CP101", "cp_size at the top"),
    "no number": (("cp_size: 2", "cp_size: two"), "CP111", "cp size two"),
    "method": (("alltoall", "carousel"), "CP111", "rotate method carousel"),
    "sequence parallel": (
        ("parallelism_config_cp_size: 2", "parallelism_config_cp_size: 2\n  parallelism_config_sp_size: 2"),
        "CP107",
        "cp 2, sp 2",
    ),
}


def write(path: Path, text: str) -> Path:
    file = path / "accelerate.yaml"
    file.write_text(text)
    return file


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_")) or name == "WORLD_SIZE":
            monkeypatch.delenv(name)


@HAS_CONFIG
def test_a_good_config_is_fine(tmp_path: Path) -> None:
    report = diagnose(config=write(tmp_path, GOOD))
    assert seen(report, "error") == []
    assert seen(report, "ok")[:3] == [("ok", "CP101"), ("ok", "CP109"), ("ok", "CP110")]
    assert seen(diagnose(config=write(tmp_path, GOOD.replace("FSDP", "MULTI_CPU"))), "error") == []


@HAS_CONFIG
@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_fails_is_explained(tmp_path: Path, case: str) -> None:
    change, code, words = CONFIGS[case]
    assert GOOD.count(change[0]) == 1
    report = diagnose(config=write(tmp_path, GOOD.replace(*change)))
    (finding,) = [one for one in report.found("error") if one.code == code]
    assert words in finding.evidence
    assert "accelerate.yaml" in finding.evidence
    assert finding.remedy
    assert report.ok is False


@pytest.mark.parametrize("text", ["- a list", "", "a: [", "\x00"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigUnreadable, match=r"accelerate\.yaml"):
        diagnose(config=write(tmp_path, text))
    with pytest.raises(ConfigUnreadable, match="No such file"):
        diagnose(config=tmp_path / "none.yaml")


def test_a_config_cannot_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(ConfigUnreadable):
        diagnose(config=write(tmp_path, f"a: !!python/object/apply:os.mkdir ['{mark}']"))
    assert not mark.exists()


ENVIRONMENTS = {
    "nothing": ({}, "note", "CP101", "no config file"),
    "no switch": ({SIZE: "2"}, "error", "CP101", f"{SWITCH}=None"),
    "a switch that is none": ({SIZE: "2", SWITCH: "1"}, "error", "CP101", f"{SWITCH}=1"),
    "both": ({SIZE: "2", SWITCH: "true"}, "ok", "CP101", "cp 2"),
    "size 1": ({SIZE: "1", SWITCH: "true"}, "note", "CP101", "cp 1"),
    "no number": ({SIZE: "many", SWITCH: "true"}, "error", "CP111", "cp size many"),
    "processes": ({SIZE: "2", SWITCH: "true", "WORLD_SIZE": "8"}, "error", "CP109", "cp 2 = 2, and 8 processes"),
    "FSDP1": ({SIZE: "2", SWITCH: "true", "ACCELERATE_USE_FSDP": "true"}, "error", "CP110", "FSDP1"),
    "FSDP2": (
        {SIZE: "2", SWITCH: "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
        "ok",
        "CP110",
        "FSDP2",
    ),
    "DeepSpeed": ({SIZE: "2", SWITCH: "true", "ACCELERATE_USE_DEEPSPEED": "true"}, "error", "CP110", "DeepSpeed"),
    "Ulysses": ({"PARALLELISM_CONFIG_SP_SIZE": "2", SWITCH: "true"}, "warning", "CP107", "sp 2"),
}


@HAS_CONFIG
@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    variables, severity, code, words = ENVIRONMENTS[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    report = diagnose()
    (finding,) = [one for one in report.found(severity) if one.code == code]  # type: ignore[arg-type]
    assert words in finding.evidence
    assert report.ok is (severity != "error")


@pytest.mark.skipif(RELEASE.has_config, reason="this accelerate reads them")
def test_an_accelerate_that_reads_no_settings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE, "2")
    monkeypatch.setenv(SWITCH, "true")
    assert ("error", "CP106") in seen(diagnose())


def test_what_the_installed_accelerate_lacks_is_said() -> None:
    found = seen(diagnose(), "ok", "note", "warning")
    if not RELEASE.has_config:
        assert ("note", "CP106") in found
    else:
        assert ("ok" if RELEASE.own_context == "prepare" else "warning", "CP403") in found


def test_no_secret_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz0123"
    for name in (SIZE, SWITCH, "PARALLELISM_CONFIG_CP_COMM_STRATEGY", "PARALLELISM_CONFIG_DP_SHARD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, secret)
    for name in ("FSDP_VERSION", "ACCELERATE_USE_FSDP", "ACCELERATE_LOG_WITH", "HF_TOKEN", "FSDP_OFFLOAD_PARAMS"):
        monkeypatch.setenv(name, secret)
    text = GOOD.replace("alltoall", secret).replace("num_processes: 8", f"num_processes: {secret}\ntoken: {secret}")
    report = diagnose(config=write(tmp_path, text))
    assert "(set, not shown)" in str(report)
    assert secret not in str(report) + json.dumps(report.to_dict())


# --- other packages, as their metadata say ------------------------------------------------------------------------------


def fake(path: Path, distribution: str, version: str, module: str = "") -> None:
    """Metadata of a distribution, and a module of it, found before the real ones by a fresh interpreter."""
    info = path / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    module = module or distribution
    (info / "top_level.txt").write_text(module)
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n")
    (path / module).mkdir(exist_ok=True)
    (path / module / "__init__.py").write_text("raise ImportError('the doctor must not import this')")


def doctor(*arguments: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    where = [str(path)] if path else []
    where += [str(Path(cpcompat.__file__).parent.parent), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-m", "cpcompat", "doctor", *arguments],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(where)},
        capture_output=True,
        text=True,
        timeout=60,
    )


PACKAGES = {
    "old torch": (("torch", "2.5.1"), "error", "CP106", "torch 2.5.1"),
    "torch 2.10": (("torch", "2.10.0+cu128"), "note", "CP404", "wrong order"),
    "torch before 2.13": (("torch", "2.12.1"), "note", "CP404", "leaves attention patched"),
    "old transformers": (("transformers", "5.15.0"), "note", "CP402", "transformers 5.15.0"),
    "broken accelerate": (("accelerate", "1.12.0"), "warning", "CP403", "accelerate 1.12.0"),
    "old accelerate": (("accelerate", "1.9.0"), "note", "CP106", "accelerate 1.9.0"),
    "new accelerate": (("accelerate", "99.0"), "warning", "CP401", "accelerate 99.0"),
    "axolotl": (("axolotl", "0.16.0"), "note", "CP108", "axolotl 0.16.0"),
    "unsloth": (("unsloth", "2026.10.1"), "note", "CP108", "unsloth 2026.10.1"),
    "habana": (("optimum-habana", "1.19.0", "optimum"), "note", "CP108", "optimum-habana 1.19.0"),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_what_is_installed_is_read_and_not_imported(tmp_path: Path, case: str) -> None:
    package, severity, code, words = PACKAGES[case]
    fake(tmp_path, *package)
    done = doctor("--json", path=tmp_path)
    assert done.returncode == (1 if severity == "error" else 0), done.stderr
    report = json.loads(done.stdout)
    found = [one for one in report["findings"] if (one["severity"], one["code"]) == (severity, code)]
    assert any(words in one["evidence"] for one in found), report


# --- the command --------------------------------------------------------------------------------------------------------


def test_the_doctor_prints_80_columns_without_colour(tmp_path: Path) -> None:
    bad = GOOD.replace("fsdp_version: 2", "fsdp_version: 1").replace("cp_size: 2", "cp_size: 4")
    done = doctor("--config", str(write(tmp_path, bad)))
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    assert "\033" not in done.stdout
    severities = re.findall(r"^  (error|warning|note|ok) +CP", done.stdout, re.M)
    assert severities == sorted(severities, key=["error", "warning", "note", "ok"].index)
    assert str(ACCELERATE).removeprefix("accelerate ") in done.stdout


def test_the_doctor_exits_0_without_errors_and_2_for_wrong_usage(tmp_path: Path) -> None:
    assert doctor().returncode == 0
    for arguments in (["--config", str(tmp_path / "none")], ["--config"], ["--fix"]):
        done = doctor(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "usage:" in done.stderr


def test_the_doctor_imports_no_torch_and_takes_less_than_a_second(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from cpcompat.__main__ import main\n"
        f"main(['doctor', '--config', {str(write(tmp_path, GOOD))!r}])\n"
        "print([m for m in ('torch', 'accelerate', 'transformers', 'numpy') if m in sys.modules], file=sys.stderr)\n"
    )
    times = []
    for _ in range(3):
        before = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        times.append(time.perf_counter() - before)
        assert done.stderr.strip() == "[]"
    assert min(times) < 1.0


# --- the report ---------------------------------------------------------------------------------------------------------


def test_colour_changes_nothing_else() -> None:
    report = Report(tuple(Finding.of("CP101", severity, "seen") for severity in ("ok", "note", "warning", "error")))
    coloured = report.table(colour=True)
    assert coloured.count("\033[") == 8
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == str(report)
    assert str(report).endswith("1 error, 1 warning, 1 note, 1 ok")


def test_a_finding_has_the_words_of_the_table() -> None:
    row, finding = CODES["CP204"], Finding.of("CP204", "error", "ranks 0 and 1")
    assert (finding.title, finding.why, finding.remedy) == (row.title, row.reason, row.remedy)
    assert finding.to_dict()["reports"][0] == "https://github.com/bghira/SimpleTuner/issues/2313"
    raised = Finding.raised(CPNotRequested("what", "evidence", "next step"))
    assert (raised.code, raised.severity, raised.title) == ("CP101", "error", "what")
    assert (raised.evidence, raised.remedy) == ("evidence", "next step")
    json.dumps(Report((finding, raised)).to_dict())
