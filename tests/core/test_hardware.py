"""Known devices and links: documents, assumptions, and files of the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.hardware import PRECISIONS, load_catalogue
from hocket.errors import ParseError, PlanError

WANTED = {
    *("p100", "titan-xp", "v100-16g", "v100-32g", "rtx-5000"),
    *("a100-40g", "a100-80g", "h100", "h200"),
}
GENERATIONS = (
    ("pcie3", "pcie4", "pcie5"),
    ("nvlink1", "nvlink2", "nvlink3", "nvlink4"),
    ("10gb", "25gb", "40gb", "100gb", "200gb", "400gb"),
)


def test_every_number_has_its_source_or_its_reason() -> None:
    """Documents for peaks, reasons for what is reached of them."""
    known = load_catalogue()
    assert set(known.devices) >= WANTED
    assert set(known.links) >= {name for names in GENERATIONS for name in names}
    for device in known.devices.values():
        assert len(device.source) > 20
        assert set(device.flops) <= set(PRECISIONS)
        assert 0 < device.usable_bytes < device.memory_bytes
        assert all(link in known.links for link in device.links)
        assert device.reached_flops("float32") < device.flops["float32"]
    assert all(link.source for link in known.links.values())
    assert all(len(assumption.why) > 40 for assumption in known.assumed.values())


def test_newer_generations_are_faster() -> None:
    """PCIe and NVLink by generation, networks by their names."""
    links = load_catalogue().links
    for names in GENERATIONS:
        rates = [links[name].bytes_per_s for name in names]
        assert rates == sorted(set(rates))
    assert links["100gb"].bytes_per_s == 100e9 / 8


def test_a_link_is_shared_and_not_reached_whole() -> None:
    """Half of what is reached, for two."""
    kind = load_catalogue().link("nvlink3")
    assert kind.link(2).bytes_per_s == pytest.approx(300e9 * 0.8 / 2)


def test_nvlink_is_the_devices_own() -> None:
    """Whatever its generation."""
    known = load_catalogue()
    assert known.link("nvlink", known.device("V100-32G")).key == "nvlink2"
    assert known.link("pcie", known.device("h100")).key == "pcie5"


def test_errors_name_the_nearest() -> None:
    """The error names the nearest key, and all keys."""
    known = load_catalogue()
    with pytest.raises(PlanError, match=r"did you mean 'v100-16g'"):
        known.device("v100-16")
    with pytest.raises(PlanError, match="no link is named 'infiniband'"):
        known.link("infiniband")
    with pytest.raises(PlanError, match="does not multiply in 'bfloat16': use float32"):
        known.device("v100-16g").reached_flops("bfloat16")


def test_a_file_of_ones_own_is_laid_over(tmp_path: Path) -> None:
    """New devices and links; and other numbers for what is known."""
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [devices.mine]
        memory_gib = 48
        bandwidth_gb_per_s = 864
        tflops = { float32 = 91.1 }
        links = ["mine-link"]
        matmul_fraction = 0.5
        source = "measured by us"

        [links.mine-link]
        gb_per_s = 20
        latency_s = 1e-5
        source = "measured by us"

        [assumed.link_fraction]
        value = 0.5
        why = "measured by us"
        """
    )
    known = load_catalogue(path)
    mine = known.device("mine")
    assert mine.memory_bytes == 48 * 2**30
    assert mine.reached_flops("float32") == pytest.approx(0.5 * 91.1e12)
    assert known.link("mine-link").link().bytes_per_s == pytest.approx(10e9)
    assert set(known.devices) >= WANTED
    assert load_catalogue().link("nvlink3").fraction == 0.8


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[devices.x]\nmemory_gib = 1", "bandwidth_gb_per_s must be given"),
        ("[devices.h100]\nmemory = 80", r"\[devices.h100\].*did you mean 'memory_gib'"),
        (
            "[links.x]\ngb_per_s = -1\nlatency_s = 1\nsource = 's'",
            r"\[links.x\] gb_per_s: must be a number above 0, got -1",
        ),
        ("[gpus.x]\nmemory_gib = 1", r"\[gpus\] is no section"),
        ("devices = 3", "is no section"),
        ("[devices", "cannot be read as TOML"),
        (
            "[devices.x]\nmemory_gib = 1\nbandwidth_gb_per_s = 1\nsource = 's'\n"
            "tflops = { int8 = 1 }",
            "must give numbers for some of float32",
        ),
        (
            "[devices.x]\nmemory_gib = 1\nbandwidth_gb_per_s = 1\nsource = 's'\n"
            "tflops = { float32 = 1 }\nlinks = ['nvlonk']",
            "'nvlonk' is no link; did you mean",
        ),
        # Beyond all measure; each was a traceback, or taken.
        ("[links.x]\nlatency_s = " + "[" * 100_000, "line [12]"),
        ("[devices.h100]\nmemory_gib = " + "9" * 5000, "line [12]"),
        ("[devices.h100]\nmemory_gib = " + "9" * 400, "line [12]"),
        ("[devices.h100]\nmemory_gib = inf", "line [12]"),
        ("[devices.h100]\nmemory_gib = nan", "line [12]"),
        ("[links]\nx = 3", "line [12]"),
        ("[assumed]\nop_s = 3", "line [12]"),
        (None, "cannot be read"),  # never the built-in numbers instead
    ],
)
def test_a_file_with_faults_names_path_and_key(
    tmp_path: Path, text: str | None, match: str
) -> None:
    """Nothing is taken silently; there may be no such file."""
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ParseError, match=match) as caught:
        load_catalogue(path)
    assert str(path) in str(caught.value)


VALUES = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.floats() | st.text("ab'\"=[", max_size=4),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text("ab"), x, max_size=2),
    max_leaves=3,
)
KEYS = ["memory_gib", "bandwidth_gb_per_s", "source", "tflops", "links", "value", "why"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sections=st.dictionaries(
        st.sampled_from(["devices.h100", "devices.x", "links.x", "assumed.op_s"]),
        st.dictionaries(st.sampled_from(KEYS), VALUES),
    )
)
def test_any_file_is_read_or_refused_by_its_line(
    tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    """Infinite, enormous and misplaced values end in no traceback."""
    path = tmp_path / "mine.toml"
    text = "".join(
        f"[{name}]\n"
        + "".join(
            f"{key} = {json.dumps(value).lower()}\n" for key, value in own.items()
        )
        for name, own in sections.items()
    )
    assert_read_or_refused(path, text)


def assert_read_or_refused(path: Path, text: str) -> None:
    """Nothing but our own error, which names a line."""
    path.write_text(text)
    try:
        load_catalogue(path)
    except ParseError as error:
        message = str(error)
    else:
        message = "line 1"
    assert re.search(r"line \d+", message)
