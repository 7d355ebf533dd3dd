"""Rows of each kind of file through `RowDataset`: order, ids, positions, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from torchtitan_rl.data.row_dataset import RowDataset
from torchtitan_rl.data.rows import DataError, Row, open_sources
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.types import Problem

NUM_ROWS = 23
ROWS: list[dict[str, Any]] = [{"n": n, "text": f"row {n}\u2028ä"} for n in range(NUM_ROWS)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS, *, group: int = 5) -> str:
    """The rows in the format of the suffix; Parquet in row groups of ``group``."""
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(
            table, path, row_group_size=group, compression="none", use_dictionary=False
        )
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


KINDS = ["jsonl", "parquet", "saved", "hub"]


def write_source(kind: str, parent: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    if kind in ("jsonl", "parquet"):
        return write(parent / f"rows.{kind}", rows)
    folder = parent / "rows"
    if kind == "hub":  # the layout of a repository of the hub
        (folder / "data").mkdir(parents=True)
        write(folder / "data" / "train-00000-of-00001.parquet", rows)
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(folder)
    return f"hf:{folder}"


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return write_source(request.param, tmp_path)


def make(row_id: str, place: str, row: Row) -> Problem:
    return Problem(problem_id=row_id, data=row)


def dataset(*sources: str, seed: int = 0, shuffle: bool = True, **options: Any) -> RowDataset:
    make_problem = options.get("make", make)
    return RowDataset(open_sources(sources), make_problem, seed=seed, shuffle=shuffle)


def take(source: RowDataset, count: int) -> list[Problem]:
    return [source.next() for _ in range(count)]


def numbers(problems: list[Problem]) -> list[int]:
    return [problem.data["n"] for problem in problems]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(source: str) -> None:
    rows = dataset(source)
    epochs = []
    for epoch in range(3):
        epochs.append(numbers(take(rows, NUM_ROWS)))
        assert rows.epoch == epoch
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_id_names_the_row_whatever_the_seed(source: str) -> None:
    one, other = ({p.problem_id: p.data for p in take(dataset(source, seed=s), 23)} for s in (1, 2))
    assert one == other
    assert {int(name.rpartition(":")[2]): row for name, row in one.items()} == dict(
        enumerate(ROWS, start=1)
    )


@pytest.mark.parametrize("taken", [0, 1, 22, 23, 40])
def test_a_position_continues_exactly_in_another_process(source: str, taken: int) -> None:
    rows = dataset(source, seed=3)
    take(rows, taken)
    resumed = dataset(source, seed=4)
    resumed.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    assert resumed.epoch == rows.epoch
    assert take(resumed, 30) == take(rows, 30)


def test_without_shuffling_rows_come_in_the_order_of_the_file(source: str) -> None:
    rows = dataset(source, shuffle=False)
    assert numbers(take(rows, 25)) == [*range(NUM_ROWS), 0, 1]


def test_a_row_group_is_decoded_once_in_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rows,) = open_sources([write(tmp_path / "rows.parquet")])
    decoded: list[int] = []
    parquet_file = pytest.importorskip("pyarrow.parquet").ParquetFile
    read = parquet_file.read_row_group

    def counted(file: Any, block: int) -> Any:
        decoded.append(block)
        return read(file, block)

    monkeypatch.setattr(parquet_file, "read_row_group", counted)
    take(RowDataset([rows], make, seed=0, shuffle=True), NUM_ROWS)
    assert sorted(decoded) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        (200_000 * '{"a":', "line 2: not JSON"),
        ("1", "line 2 is not a JSON object: write one"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"n": 0}}\n{line}\n')
    rows = dataset(str(path), shuffle=False)
    rows.next()
    with pytest.raises(DataError, match=rf"rows\.jsonl, {message}"):
        rows.next()


@pytest.mark.parametrize("kind", KINDS)
def test_data_is_continued_with_where_it_is_equal_whatever_its_place(
    tmp_path: Path, kind: str
) -> None:
    texts = [str(row["text"]) for row in ROWS]
    edited = [text.replace("row 7", "row X") for text in texts]
    sources = []
    for name, of_one in (("before", texts), ("copied", texts), ("edited", edited)):
        (tmp_path / name).mkdir()
        rows = [{"n": n, "text": text} for n, text in enumerate(of_one)]
        sources.append(write_source(kind, tmp_path / name, rows))
    before, copied, changed = map(dataset, sources)
    state = before.state_dict()
    copied.load_state_dict(state)
    with pytest.raises(DataError, match="the checkpoint is of"):
        changed.load_state_dict(state)


def test_filters_that_leave_nothing_are_an_error(source: str) -> None:
    rows = dataset(source, make=lambda row_id, place, row: None)
    with pytest.raises(DataError, match="no row is left of 23"):
        rows.next()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "there is no such file"),
        ("rows.csv", "cannot tell the format"),
        ("broken.parquet", "cannot be read"),
    ],
)
def test_a_source_that_cannot_be_read_is_a_configuration_error(
    tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_text("PAR1")
    with pytest.raises(ConfigError, match=message):
        open_sources([name])


def test_a_hub_that_is_not_reached_is_asked_once_for_each_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    asked: list[str] = []

    def no_network(self: object, name: str, **_: object) -> None:
        asked.append(name)
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(hub.HfApi, "dataset_info", no_network)
    monkeypatch.setattr(hub.HfApi, "hf_hub_download", no_network)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for source in ("hf:none/such", "hf:none/other:main:test"):
        with pytest.raises(ConfigError, match=r"the hub: .*not known.*; connect to the hub, or"):
            open_sources([source])
    assert asked == ["none/such", "none/other"]
