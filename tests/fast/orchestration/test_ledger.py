import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.orchestration.ledger import LedgerError, TokenLedger, require_sums
from torchtitan_rl.orchestration.records import TokenCounts


def ledger_with(**tokens_of: int) -> TokenLedger:
    ledger = TokenLedger()
    for group_id, number in tokens_of.items():
        ledger.admit(group_id)
        ledger.generate(group_id, number)
    return ledger


def test_every_token_is_trained_masked_discarded_or_buffered() -> None:
    ledger = ledger_with(a=100, b=50, c=30, d=20)
    counts = TokenCounts(
        generated=100, trained=80, discarded={"env_error": 15, "nonfinite_logprob": 5}
    )
    ledger.train(["a"], counts, masked_by_loss={"sequence_mask": 10})
    ledger.discard("b", "zero_variance")
    ledger.discard_tokens("c", "restarted", 30)
    ledger.generate("c", 7)
    ledger.discard_tokens("c", "rolled_back", 7)
    totals = ledger.totals()
    assert (totals.tokens_generated, totals.tokens_trained, totals.tokens_buffered) == (207, 70, 20)
    assert totals.tokens_masked == {"nonfinite_logprob": 5, "sequence_mask": 10}
    assert totals.tokens_discarded == {
        "env_error": 15,
        "zero_variance": 50,
        "restarted": 30,
        "rolled_back": 7,
    }
    assert (totals.groups_admitted, totals.groups_trained, totals.groups_buffered) == (4, 1, 2)
    assert totals.groups_discarded == {"zero_variance": 1}
    assert (ledger.tokens_of("c"), ledger.tokens_of("d")) == (0, 20)


def test_a_saved_account_that_does_not_add_up_is_refused() -> None:
    state = ledger_with(a=10).state_dict()
    with pytest.raises(LedgerError, match="11 tokens generated, but 0 trained"):
        TokenLedger().load_state_dict(state | {"generated": 11})
    with pytest.raises(LedgerError, match="2 groups admitted, but 0 trained"):
        TokenLedger().load_state_dict(state | {"groups_admitted": 2})


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "generate", "train", "discard", "discard_tokens"]),
        st.sampled_from("abc"),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(_EVENTS)
def test_whatever_happens_the_account_adds_up_and_a_refused_call_changes_nothing(
    events: list[tuple[str, str, int]],
) -> None:
    ledger = TokenLedger()
    for event, group_id, number in events:
        before = ledger.state_dict()
        try:
            match event:
                case "admit":
                    ledger.admit(group_id)
                case "generate":
                    ledger.generate(group_id, number)
                case "train":
                    ledger.train([group_id], TokenCounts(generated=number, trained=number))
                case "discard":
                    ledger.discard(group_id, "zero_variance")
                case "discard_tokens":
                    ledger.discard_tokens(group_id, "rolled_back", number)
        except LedgerError:
            assert ledger.state_dict() == before
        require_sums(ledger.totals())
