"""Token ids become texts: whole characters, and nothing that could run."""

from collections.abc import Sequence

import pytest

from vllm_mtp.page.document import document
from vllm_mtp.page.rounds import RequestRounds, Round
from vllm_mtp.page.texts import pieces, with_texts

BYTES = "a😀é<b>".encode()


def decode(token_ids: Sequence[int]) -> str:
    """A tokenizer of bytes."""
    return bytes(token_ids).decode(errors="replace")


def test_a_character_appears_with_the_token_that_completes_it() -> None:
    texts = pieces(decode, [], list(BYTES))
    assert texts == ["a", "", "", "", "😀", "", "é", "<", "b", ">"]
    assert "".join(texts) == BYTES.decode()


def test_a_token_is_read_after_those_before_it() -> None:
    emoji = list("😀".encode())
    assert pieces(decode, emoji[:2], emoji[2:]) == ["", "😀"]
    assert pieces(decode, emoji[1:], [97]) == ["a"], "cut within a character"


def test_ids_that_are_not_known_have_no_text() -> None:
    assert pieces(decode, [97], [-1, -1]) == ["?", "?"]


def test_a_request_with_its_texts() -> None:
    request = RequestRounds(
        3,
        "cmpl-1",
        list(b"say "),
        4,
        [
            Round([], 0, ord("h"), 1),
            Round(list(b"ixy"), 1, ord("!"), 2),
            Round(list(b"ab"), 2, ord("c"), 1),
        ],
        has_ended=True,
    )
    found = with_texts(request, decode)
    assert found["prompt"] == "say "
    assert found["rounds"] == [
        {"draft": [], "num_accepted": 0, "next": "h", "num_committed": 1},
        {"draft": ["i", "x", "y"], "num_accepted": 1, "next": "!", "num_committed": 2},
        {"draft": ["a", "b"], "num_accepted": 2, "next": "c", "num_committed": 1},
    ]
    assert found["sums"] == {
        "num_drafts": 2,
        "num_draft_tokens": 5,
        "num_accepted_tokens": 3,
        "num_committed_tokens": 4,
    }


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "{{scripts}}"])
def test_embedded_data_cannot_end_its_element(text: str) -> None:
    plain, page = document({}), document({"requests": [{"name": text}]})
    assert page.lower().count("<script") == plain.lower().count("<script") == 2
    assert page.lower().count("</script") == plain.lower().count("</script")
    assert len(page) - len(plain) < 200, "no part of the page is there twice"


def test_the_page_asks_nobody_but_its_server() -> None:
    assert "connect-src 'self'" in document()
    assert "connect-src 'none'" in document({"requests": []})
    for attribute in ("src=", "@import", "url("):
        assert attribute not in document().replace("script-src", "")
