"""Token ids that would end vLLM's engine core are refused before vLLM sees them."""

from types import SimpleNamespace

import pytest

from dcr.protocol.errors import RefusedError
from dcr.rollout.vllm.prompts import PromptCheck


def check_of(*, unchecked):
    config = SimpleNamespace(skip_tokenizer_init=unchecked, get_vocab_size=lambda: 256)
    return PromptCheck("a", SimpleNamespace(model_config=config))


@pytest.mark.parametrize("token", [-1, 256, 10**30])
@pytest.mark.parametrize("around", [list, tuple, lambda ids: {"prompt_token_ids": ids}])
def test_an_id_that_the_model_does_not_have_is_refused_where_vllm_does_not_check(token, around):
    prompt = around([0, token, 255])
    with pytest.raises(RefusedError, match=rf"engine a: the prompt holds token id {token}, and the model has 0 to 255"):
        check_of(unchecked=True).check(prompt)
    check_of(unchecked=False).check(prompt)  # vLLM does, and knows the tokenizer's ids as well


@pytest.mark.parametrize("prompt", [[0, 255], {"prompt_token_ids": [0, 255]}, [], {"prompt": "text"}, "text", None])
def test_what_vllm_can_judge_is_left_to_it(prompt):
    check_of(unchecked=True).check(prompt)


@pytest.mark.parametrize("ids", ["text", b"bytes", {"prompt_token_ids": [1]}, [1, "2"], iter([1, 2]), None, 7])
def test_what_is_no_sequence_of_ids_is_refused(ids):
    with pytest.raises(
        RefusedError, match=r"engine a: prompt 3 is \w+, not a sequence of token ids: tokenize it first"
    ):
        check_of(unchecked=False).check_ids("prompt 3", ids)
