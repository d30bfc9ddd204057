"""The whole Nemotron-H actor on a CPU, the reference kernels in vLLM's place: against a model written a second time."""
import dataclasses

import pytest
import tiny_nemotron
import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.models.nemotron_h import Shape
from megatron.zero_mismatch.packing import Packed, pack
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged

from prove import gradients
from prove.reference_nemotron_h import Reference

LENGTHS = (5, 33, 16, 1, 48)  # within a chunk of 16, over three, one exactly, one token, three exactly


def logprobs_and_gradients(model, sequences, seed=1):
    tokens, packed = pack(sequences)
    found = model(tokens, packed)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=found.dtype)
    (found * weight).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.detach(), grads, weight


def noting(model):
    """Makes the model note its experts' choices, one entry a call of the router."""
    chosen, original = [], model.kernels

    def note(*arguments):
        weights, ids = original.router_top_k(*arguments)
        chosen.append(ids)
        return weights, ids

    model.kernels = dataclasses.replace(original, router_top_k=note)
    return chosen


def test_values_and_every_gradient_are_those_of_the_independent_model():
    model = tiny_nemotron.model(torch.float64)
    chosen = noting(model)
    sequences = tiny_nemotron.sequences(*LENGTHS)
    found, grads, weight = logprobs_and_gradients(model, sequences)
    reference = Reference(tiny_nemotron.CONFIG, dict(model.exported()), torch.float64)
    want = reference.logprobs(sequences, chosen)
    predicted = pack(sequences)[1].positions > 0
    assert torch.allclose(found[predicted], want, rtol=0, atol=1e-12)
    assert not found[~predicted].any(), "nothing predicts a first token"
    (want * weight[predicted]).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert grads.keys() == trained
    weights = dict(model.exported())
    for name, gradient in grads.items():
        engine, factor = gradients._engine_name(name, weights)
        wanted = reference.w[engine].grad * factor
        assert (gradient - wanted).norm() <= 1e-10 * wanted.norm(), name


def test_only_the_correction_bias_is_not_trained():
    frozen = {name for name, p in tiny_nemotron.model().named_parameters() if not p.requires_grad}
    assert frozen == {f"model.layers.{i}.mixer.gate.e_score_correction_bias" for i in (1, 5)}


@pytest.fixture(scope="module")
def invariant():
    return tiny_nemotron.row_by_row(kernels.reference())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@torch.no_grad()
def test_packing_and_micro_batches_change_no_bit_over_invariant_kernels(invariant):
    model = tiny_nemotron.model(table=invariant)
    sequences = tiny_nemotron.sequences(*LENGTHS)
    together = model(*pack(sequences)).split(LENGTHS)
    for cut in ([[0], [1], [2, 3], [4]], [[4, 1], [3, 0, 2]]):
        for batch in cut:
            parts = model(*pack([sequences[i] for i in batch])).split([LENGTHS[i] for i in batch])
            assert all(same(part, together[i]) for part, i in zip(parts, batch, strict=True))


def test_recomputation_changes_no_bit_of_values_or_gradients():
    sequences = tiny_nemotron.sequences(*LENGTHS)
    plain = logprobs_and_gradients(tiny_nemotron.model(), sequences)
    again = logprobs_and_gradients(tiny_nemotron.model(recompute=True), sequences)
    assert same(plain[0], again[0])
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def test_a_logprob_depends_on_nothing_behind_its_token():
    model = tiny_nemotron.model(torch.float64)
    (sequence,) = tiny_nemotron.sequences(48)
    with torch.no_grad():
        whole, head = model(*pack([sequence])), model(*pack([sequence[:20]]))
    assert torch.allclose(whole[:20], head, rtol=0, atol=1e-13)


def test_the_whole_vocabulary_has_the_bits_of_each_token_that_is_there(invariant):
    made = tiny_nemotron.model(table=invariant)
    tokens, packed = pack(tiny_nemotron.sequences(*LENGTHS))
    with torch.no_grad():
        one = made(tokens, packed)
    places = (packed.positions > 0).nonzero()[:, 0]
    every = made.vocabulary(tokens, packed, places)
    with pytest.raises(ValueError, match="nothing predicts it"):  # the row before is another sequence's
        made.vocabulary(tokens, packed, places - 1)
    assert same(every.gather(1, tokens[places, None])[:, 0], one[places])
    assert every.shape == (len(places), made.shape.vocab) and every.dtype == torch.float32
    torch.testing.assert_close(every.double().exp().sum(1), torch.ones(len(places), dtype=torch.float64), rtol=1e-5,
                               atol=0)


def test_bf16_gradients_are_as_near_to_fp64_as_the_usual_model():
    """The bound of `prove grad`, in small: two models with the same number of roundings."""
    model = tiny_nemotron.model()
    chosen = noting(model)
    sequences = tiny_nemotron.sequences(*LENGTHS)
    _, grads, weight = logprobs_and_gradients(model, sequences)
    weights, predicted = dict(model.exported()), pack(sequences)[1].positions > 0
    sides = []
    for dtype in (torch.float64, torch.bfloat16):
        reference = Reference(tiny_nemotron.CONFIG, weights, dtype)
        (reference.logprobs(sequences, chosen) * weight[predicted]).sum().backward()
        sides.append(reference.w)
    own, usual = [], []
    for name, gradient in grads.items():
        engine, factor = gradients._engine_name(name, weights)
        want, plain = (side[engine].grad.double() * factor for side in sides)
        own.append(gradients._error(gradient.double(), want))
        usual.append(gradients._error(plain, want))
    assert sum(own) <= 1.5 * sum(usual) and max(own) < 0.5


def test_backward_after_a_write_to_the_weights_is_refused():
    model = tiny_nemotron.model()
    guard = WeightGuard(model.named_parameters)
    out = guard.seal(model(*pack(tiny_nemotron.sequences(8))))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(WeightsChanged, match="lm_head"):
        out.sum().backward()


def test_export_gives_what_an_engine_holds_and_take_reads_it_back():
    weights = tiny_nemotron.engine_weights()
    model = tiny_nemotron.model()
    exported = dict(model.exported())
    assert exported.keys() == weights.keys()
    for name, theirs in weights.items():
        assert exported[name].shape == theirs.shape and exported[name].dtype == theirs.dtype
        if name.endswith(".A"):  # through its logarithm: to an ulp or two, hence the export before a first rollout
            assert torch.allclose(exported[name], theirs, rtol=1e-6)
        else:
            assert torch.equal(exported[name], theirs)


def test_another_models_weights_are_refused_by_name():
    model = tiny_nemotron.model()
    weights = dict(tiny_nemotron.engine_weights())
    weights["model.layers.9.norm.weight"] = weights.pop("model.layers.0.norm.weight")
    with pytest.raises(ValueError, match="2 names are on one side only, first 'model.layers.0.norm.weight'"):
        model.take(weights)


@pytest.mark.parametrize("change, said", [
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu', expected 'relu2'"),
    ({"n_group": 4}, "n_group = 4"),
    ({"moe_latent_size": 512}, "moe_latent_size = 512"),
    ({"hybrid_override_pattern": "MX"}, r"layers \['X'\]"),
])
def test_what_is_not_written_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Shape.from_hf({**tiny_nemotron.CONFIG, **change})


def test_lengths_that_are_not_the_tokens_are_refused():
    with pytest.raises(ValueError, match="found 4 tokens for lengths that sum to 3"):
        tiny_nemotron.model()(torch.zeros(4, dtype=torch.int64), Packed((3,), torch.device("cpu")))


def test_a_batch_without_anything_to_predict_is_refused():
    with pytest.raises(ValueError, match="nothing to predict"):
        tiny_nemotron.model()(*pack(tiny_nemotron.sequences(1, 1)))


def test_the_rollouts_kernels_are_refused_without_batch_invariance(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(ValueError, match="expected 1"):
        kernels.from_vllm(page=16)


def test_a_parameter_that_the_actor_leaves_without_a_gradient_is_not_overlooked():
    one, zero = torch.ones(2), torch.zeros(2)
    gradients.require_all({"a": one, "b": zero, "c": None}, {"a"})  # nothing depends on b and c
    with pytest.raises(RuntimeError, match="no gradient of b; the reference has one"):
        gradients.require_all({"a": one, "b": one, "c": None}, {"a"})
