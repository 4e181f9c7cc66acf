"""The page of a verify: its structure, its figures, and that it asks nothing of a network."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mlxconv.cli import cli
from mlxconv.convert.verify.metrics import Row, Sums, make_row
from mlxconv.convert.verify.page import check_place, page
from mlxconv.convert.verify.pictures import Compared, image_rows, trajectory_rows
from mlxconv.convert.verify.pipelines import Run
from mlxconv.convert.verify.plots import Point, Series, log_plot
from mlxconv.convert.verify.verify import ParityReport
from mlxconv.runtime.errors import MlxconvError

from ...conftest import Bundles

HOSTILE = "a cat \"</title><script>alert('x')</script><img src=x onerror=alert(1)> & a dog"
SIZES: list[dict[str, Any]] = [
    {"name": "transformer", "class": "Tiny", "parameters": 1000, "source": 4000, "bundle": 1000,
     "bits": 8.0, "quantized": 3, "status": "converted"},
    {"name": "vae", "class": "<b>", "parameters": 10, "source": 0, "bundle": 40, "bits": 32.0,
     "quantized": 0, "status": "copied"},
]  # fmt: skip
VOID = {"meta", "img", "input", "br", "link"}


class Page(HTMLParser):
    """What a test asks of a page: its elements, the text in them, whether all of it is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source, self.open = text, list[str]()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [a for t, a in self.elements if t == tag and wanted.items() <= a.items()]

    def text(self, tag: str) -> str:
        return " ".join(self.texts.get(tag, []))


def row(tier: str, name: str, rel_l2: float, threshold: float | None = 1e-4) -> Row:
    sums = Sums(rel_l2**2, 1.0, 1.0, 1.0, rel_l2, 1.0)
    return make_row(tier, "transformer", name, sums, threshold, "diffusers 1 fp32 cpu",
                    passed=None if threshold else True)  # fmt: skip


def made(quantized: bool = True, prompt: str = HOSTILE) -> ParityReport:
    """A report with every tier, its pictures of 6 x 4 pixels."""
    rng = np.random.default_rng(0)
    exact = rng.uniform(0.2, 0.8, (1, 4, 6, 3))
    runs = [Run(exact + gap, [exact + gap, exact - gap]) for gap in (0.0, 1e-4, 0.02)]
    original = runs[2] if quantized else None
    compared = Compared(prompt, "", "diffusers 1 fp32 cpu", runs[1], runs[0], None, original)
    rows = [
        row("weights", "9 tensors", 0.0, None), row("forward", "forward", 2e-5),
        row("block", "blocks.0", 1e-5), row("block", "blocks.1", 3e-5),
    ]  # fmt: skip
    rows += trajectory_rows(compared, None) + image_rows(compared, None)
    asked = {
        "pipeline": "FluxPipeline", "runtime": "native", "components": ["transformer"],
        "precision": "float32", "steps": 2, "guidance": None, "seed": 7,
    }  # fmt: skip
    return ParityReport("out/4bit", "source", 7, rows, generated=asked, compared=[compared])


@pytest.fixture(scope="module")
def shown() -> Page:
    return Page(page(made(), SIZES, f"mlxconv verify out/4bit --prompt '{HOSTILE}'"))


def pictures(shown: Page) -> list[Any]:
    """Decoded, in order."""
    prefix = "data:image/png;base64,"
    found = [str(a["src"]) for a in shown.all("img")]
    assert all(source.startswith(prefix) for source in found)
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(source.removeprefix(prefix)))))
        for source in found
    ]


# ---- what is on it ------------------------------------------------------------------------------


def test_it_has_every_part(shown: Page) -> None:
    assert [part.strip() for part in shown.texts["h2"]] == [
        "Pictures", "Error along the trajectory", "Error per block", "All figures", "Sizes",
        "How to get it again", "What the figures mean",
    ]  # fmt: skip
    assert shown.text("strong") == "PASSED"
    for tier in ("weights", "forward", "block", "trajectory", "image"):
        assert shown.all("div", id=f"tier-{tier}")
    for name in ("mlxconv", "mlx", "torch", "diffusers", "transformers", "python", "seed", "chip"):
        assert name in shown.texts["dt"]
    assert "mlxconv verify out/4bit" in shown.text("code")


def test_its_figures_are_those_of_the_report(shown: Page) -> None:
    rows = made().as_json()["tiers"]
    names = ("psnr_db", "rel_l2", "threshold", "max_rel", "max_abs", "cosine", "sqnr_db")
    figures = [r[n] for r in rows for n in names if r[n] is not None]
    assert [float(str(a["value"])) for a in shown.all("data")] == figures


def test_no_value_becomes_markup(shown: Page) -> None:
    assert HOSTILE in shown.text("h3")
    assert HOSTILE in shown.text("code")
    assert len(shown.all("script")) == 1
    assert not [a for _, a in shown.elements for name in a if name.startswith("on")]
    assert "<b>, copied" in shown.text("td")


def test_it_asks_nothing_of_a_network(shown: Page) -> None:
    markup = re.sub(r"data:image/png;base64,[\w+/=]+", "", shown.source)
    assert not re.search(r"https?:|//[a-z]", markup)
    assert not [a for _, a in shown.elements if "href" in a]
    assert not re.search(r"@import|url\(", shown.source)
    (policy,) = shown.all("meta", **{"http-equiv": "Content-Security-Policy"})
    digest = base64.b64encode(hashlib.sha256(shown.text("script").encode()).digest()).decode()
    assert policy["content"] == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )


def test_pictures_are_reference_bundle_and_differences(shown: Page) -> None:
    (compared,) = made().compared
    found = pictures(shown)
    assert compared.original is not None
    for levels, run in zip(found, (compared.original, compared.ours)):
        assert run.pixels is not None
        assert np.array_equal(levels, np.round(255 * run.pixels[0]))
    assert [picture.shape for picture in found] == [(4, 6, 3)] * 4
    assert all(a["alt"] for a in shown.all("img"))
    assert "0.02" in shown.text("span")  # what the brightest colour stands for
    assert "0.0001" in shown.text("span")


def test_a_heat_map_is_brightest_where_the_difference_is_largest() -> None:
    report = made(quantized=False)
    (compared,) = report.compared
    assert compared.ours.pixels is not None and compared.exact.pixels is not None
    compared.ours.pixels = compared.exact.pixels.copy()
    compared.ours.pixels[0, 2, 3, 1] += 0.1
    heat = pictures(Page(page(report, SIZES, "")))[2].astype(int).sum(axis=-1)
    assert np.unravel_index(heat.argmax(), heat.shape) == (2, 3)
    assert set(np.delete(heat.ravel(), heat.argmax())) == {4}  # the colour of no difference


def test_the_slider_is_labelled_and_waits_for_its_script(shown: Page) -> None:
    (slider,) = shown.all("input", type="range")
    assert shown.all("label", for_=str(slider["id"]))
    assert all("hidden" in a for a in shown.all("div", class_="compare"))


def test_a_failure_says_where_it_begins() -> None:
    report = made()
    report.tiers.append(row("forward", "decode", math.inf))
    report.begins_at["vae"] = "decoder.<b>"
    shown = Page(page(report, SIZES, ""))
    assert shown.text("strong") == "FAILED"
    assert "1 of 8 judged comparisons are not" in shown.text("p")
    assert "decoder.<b>" in shown.text("code")
    assert "not finite" in shown.text("td")


def test_a_component_alone_has_no_pictures() -> None:
    report = ParityReport("b", "s", 0, [row("forward", "forward", 1e-6)], notes=["no pictures: x"])
    shown = Page(page(report, SIZES[:1], ""))
    assert not shown.all("img")
    assert "no pictures: x" in shown.text("p")
    assert "Pictures" not in shown.text("h2")


def test_long_tables_are_folded() -> None:
    rows = [row("block", f"blocks.{i}", 1e-6) for i in range(57)]
    report = ParityReport("b", "s", 0, [row("forward", "forward", 1e-6), *rows])
    assert Page(page(report, SIZES, "")).text("summary") == "57 rows"


# ---- plots --------------------------------------------------------------------------------------


def points(values: list[float], limit: float | None = 1e-4) -> list[Point]:
    return [
        Point(f"blocks.{i}", "blocks", str(i), v, limit, v <= (limit or math.inf))
        for i, v in enumerate(values)
    ]


def test_a_plot_goes_up_with_the_logarithm() -> None:
    drawn = Page(log_plot([Series("bundle", "first", points([1e-6, 1e-5, 1e-4]))], "x", 400))
    heights = [float(str(a["cy"])) for a in drawn.all("circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert heights[0] > heights[2]
    assert "10⁻⁶" in drawn.text("text")


@pytest.mark.parametrize("values", [[0.0], [0.0, 1e-5], [math.inf, 1e-5], [math.nan], [1e-30, 1e3]])
def test_a_plot_holds_whatever_was_measured(values: list[float]) -> None:
    drawn = Page(log_plot([Series("bundle", "first", points(values))], "<x>", 358))
    assert len(drawn.all("circle")) + len(drawn.all("path", class_="wrong")) == len(values)
    assert "nan" not in re.sub("<title>.*?</title>", "", drawn.source)
    assert all(0 <= float(str(a["cy"])) <= 240 for a in drawn.all("circle"))


def test_names_under_a_plot_do_not_overlap() -> None:
    groups = ["decoder.mid_block.attentions", "decoder.up_blocks", "encoder.down_blocks", "output"]
    found = [Point(g, g, "0", 1e-6, 1e-4, True) for g in groups]
    drawn = Page(log_plot([Series("bundle", "first", found)], "x", 358))
    names = [a for a in drawn.all("text") if a.get("text-anchor") == "middle" and a["x"]]
    assert len({(a["x"], a["y"]) for a in names}) == 2 * len(groups)
    assert len({a["y"] for a in names}) > 2  # on rows of their own


# ---- writing ------------------------------------------------------------------------------------


def test_the_command_writes_a_page_with_blocks(
    flux_bundle: Bundles, flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    command = ["verify", str(flux_bundle("4bit")), "--against", str(flux_checkpoint), "--json"]
    secret = f"hf_{'a1' * 17}"
    monkeypatch.setattr("sys.argv", ["mlxconv", "verify", f"{Path.home()}/art", "--x", secret])
    found = CliRunner().invoke(cli, [*command, "--report", str(out)])
    assert found.exit_code == 0, found.exception
    data = json.loads(found.stdout)
    assert [r["name"] for r in data["tiers"] if r["tier"] == "block"]
    assert "has no pipeline" in data["notes"][0]
    text = out.read_text(encoding="utf-8")
    assert secret not in text and "mlxconv verify ~/art --x" in text
    shown = Page(text)
    assert {a["aria-label"] for a in shown.all("svg", role="img")} == {"rel_l2, transformer"}
    assert list(tmp_path.iterdir()) == [out]


def test_the_command_writes_a_page_with_pictures(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    command = ["verify", str(pipeline_bundle("fp32")), "--against", str(pipeline_checkpoint)]
    options = ["--size", "48x32", "--steps", "1", "--component", "vae", "--json"]
    found = CliRunner().invoke(cli, [*command, *options, "--report", str(out)])
    assert found.exit_code == 0, found.exception
    data = json.loads(found.stdout)
    assert {r["tier"] for r in data["tiers"]} == {
        "weights", "forward", "block", "trajectory", "image"
    }  # fmt: skip
    shown = Page(out.read_text(encoding="utf-8"))
    assert [picture.shape for picture in pictures(shown)] == [(32, 48, 3)] * 3
    psnr = data["tiers"][-1]["psnr_db"]
    assert f"{psnr:.1f} dB PSNR" in shown.text("dd")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match="is a folder; --report takes the file"):
        check_place(tmp_path)
    with pytest.raises(MlxconvError, match=r"no folder .*absent; create it first"):
        check_place(tmp_path / "absent" / "report.html")


# ---- in a browser -------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
_PROBE = """<script>
const frame = document.querySelector("iframe").contentWindow;
const root = frame.document.documentElement;
const stage = frame.document.querySelector(".stage");
const slider = frame.document.querySelector("input");
slider.value = 20; slider.dispatchEvent(new frame.Event("input"));
const clip = frame.getComputedStyle(stage.children[1]).clipPath;
document.body.textContent = JSON.stringify([root.scrollWidth - root.clientWidth, clip,
  stage.parentElement.hidden]);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to look at the page with")
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_a_phone_and_a_desktop(shown: Page, width: int, tmp_path: Path) -> None:
    """In a frame of that width, since a headless window is at least 500 pixels wide."""
    source = shown.source.replace("&", "&amp;").replace('"', "&quot;")
    frame = f'<iframe width="{width}" height="800" style="border:0" srcdoc="{source}"></iframe>'
    run = f"<body>{frame}<p>loading</p></body>"
    waits = _PROBE.replace("<script>", "<script>onload = () => {").replace(
        "</script>", "};</script>"
    )
    (tmp_path / "frame.html").write_text(run + waits, encoding="utf-8")
    dumped = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}",
         (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert '[0,"inset(0px 0px 0px 20%)",false]' in dumped
