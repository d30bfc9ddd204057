"""The version guard, the digest and the sync protocol, with planted faults: each must be refused."""
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.zero_mismatch import digest as digest_module
from megatron.zero_mismatch.digest import merge_ranks, tensor_digests, total_digest
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged
from megatron.zero_mismatch.weight_sync import (
    Manifest,
    Receipt,
    SyncLedger,
    SyncRefused,
    Tag,
    WeightReceiver,
)

MASK = (1 << 64) - 1


def one(tensor):
    return tensor_digests([("w", tensor)])["w"]


# ---- the digest


def _python_sums(data: bytes) -> str:
    """The same digest in Python's integers, written from the definition."""
    data += bytes(-len(data) % 8)
    lanes = [0, 0]
    for index in range(len(data) // 8):
        x = int.from_bytes(data[8 * index : 8 * index + 8], "little")
        x ^= (index + 1) * 0x9E3779B97F4A7C15 & MASK
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & MASK
        x ^= x >> 27
        x = x * 0x94D049BB133111EB & MASK
        lanes[0] = (lanes[0] + x) & MASK
        x ^= x >> 31
        x = x * 0x9E3779B97F4A7C15 & MASK
        x ^= x >> 29
        lanes[1] = (lanes[1] + x) & MASK
    return "".join(f"{lane:016x}" for lane in lanes)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_digest_is_its_definition_at_every_length(data):
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert one(tensor).digest == _python_sums(data)


def test_digest_is_pinned():
    """Both sides of a sync, on any device and release of PyTorch, must agree on this constant."""
    tensor = torch.arange(1000, dtype=torch.float32).view(10, 100).to(torch.bfloat16)
    assert one(tensor) == ("bfloat16", (10, 100), _python_sums(bytes(tensor.view(torch.uint8).flatten().tolist())))
    assert total_digest({"w": one(tensor)}) == "94f7bde9fd5c23597d8c6c1cd921f878d626355afdb868f7e8d132e378220aac"


def test_digest_does_not_depend_on_the_chunk(monkeypatch):
    tensor = torch.randn(1001)
    whole = one(tensor)
    for chunk in (1, 7, 64, 500):
        monkeypatch.setitem(digest_module.CHUNK, "cpu", chunk)
        assert one(tensor) == whole


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool,
    torch.complex64,
])
def test_digest_reads_every_dtype_and_any_strides(dtype):
    tensor = torch.arange(35).view(5, 7).to(torch.float32).to(dtype)
    assert one(tensor.t().contiguous().t()) == one(tensor)
    assert one(torch.stack([tensor, tensor], 2)[:, :, 1]) == one(tensor)
    for size in (35, 32):  # with and without a partial last word
        piece = tensor.flatten()[:size].clone()
        assert one(torch.cat([piece[:3], piece])[3:]) == one(piece), "an odd storage offset"


def test_digest_reads_unaligned_memory():
    data = bytearray(range(65))
    assert one(torch.frombuffer(data, dtype=torch.uint8, offset=1)) == one(torch.arange(1, 65).to(torch.uint8))


@given(st.integers(0, 63), st.integers(0, 31), st.integers(0, 2**31 - 1))
@settings(deadline=None)
def test_one_flipped_bit_is_seen(index, bit, seed):
    words = torch.randint(-(2**31), 2**31, (64,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    before = one(words.view(torch.float32))
    words[index] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    assert one(words.view(torch.float32)) != before


def test_digest_tells_apart_what_compares_equal():
    assert one(torch.tensor([0.0])) != one(torch.tensor([-0.0]))
    assert one(torch.zeros(4)) != one(torch.zeros(2, 2))
    assert one(torch.zeros(4)) != one(torch.zeros(4, dtype=torch.int32))
    assert one(torch.zeros(4)) != one(torch.zeros(5))
    assert one(torch.empty(0)) != one(torch.empty(0, 3))
    assert one(torch.tensor([1.0, 2.0])) != one(torch.tensor([2.0, 1.0]))


def test_total_does_not_depend_on_the_order_and_names_what_is_swapped():
    a, b = torch.randn(8), torch.randn(8)
    total = total_digest(tensor_digests([("a", a), ("b", b)]))
    assert total == total_digest(tensor_digests([("b", b), ("a", a)]))
    assert total != total_digest(tensor_digests([("a", b), ("b", a)]))


def test_digest_refuses_what_it_cannot_read():
    with pytest.raises(ValueError, match="twice"):
        tensor_digests([("w", torch.ones(1)), ("w", torch.ones(1))])
    with pytest.raises(ValueError, match="materialise"):
        tensor_digests([("w", torch.ones(1, device="meta"))])
    with pytest.raises(ValueError, match="dense"):
        tensor_digests([("w", torch.eye(2).to_sparse())])


def test_ranks_merge_and_diverged_replicas_are_refused():
    shared, left, right = torch.randn(3), torch.randn(3), torch.randn(3)
    ranks = [
        tensor_digests([("shared", shared), ("left", left)]),
        tensor_digests([("right", right), ("shared", shared)]),
    ]
    assert merge_ranks(ranks) == tensor_digests([("left", left), ("right", right), ("shared", shared)])
    ranks[1] = tensor_digests([("shared", shared.nextafter(torch.tensor(9.0)))])
    with pytest.raises(ValueError, match="rank 1 holds 'shared'"):
        merge_ranks(ranks)


# ---- the guard


def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


@pytest.fixture
def guarded():
    model = small()
    return model, WeightGuard(model.named_parameters)


def sealed_loss(model, guard):
    return guard.seal(model(torch.ones(2, 4))).square().sum()


class MegatronLike:
    """Updates as megatron-core 0.19.2 does: a private fp32 copy, then `.data.copy_` into the model's weights."""

    def __init__(self, model):
        self.model = list(model.parameters())

    def step(self):
        for weight in self.model:
            weight.data.copy_(weight.data + 0.5)
        return True, None, None


def test_forward_and_backward_on_one_version_pass(guarded):
    model, guard = guarded
    first, second = sealed_loss(model, guard), sealed_loss(model, guard)  # as a pipeline schedule interleaves them
    first.backward()
    second.backward()
    assert guard.version == 0


def test_seal_is_the_tensor_itself_and_the_identity_in_backward(guarded):
    _, guard = guarded
    x = torch.tensor([-0.0, float("nan"), 2.0], requires_grad=True)
    out = guard.seal(x)
    assert torch.equal(out.detach().view(torch.int32), x.detach().view(torch.int32))
    out.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(x.grad, torch.tensor([1.0, 2.0, 3.0]))


def test_update_in_place_between_forward_and_backward_is_refused(guarded):
    model, guard = guarded
    loss = sealed_loss(model, guard)
    with torch.no_grad():
        model[0].bias.add_(1)  # a bias: autograd saves no bias, so its own check would not see this
    with pytest.raises(WeightsChanged, match="'0.bias' has writes"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters()), "the check must run before anything upstream"


def test_counter_autograd_alone_misses_a_changed_bias(guarded):
    """Why the seal exists: without it this backward passes, on weights that are not those of the forward."""
    model, _ = guarded
    loss = model(torch.ones(2, 4)).square().sum()
    with torch.no_grad():
        model[0].bias.add_(1)
    loss.backward()


def test_optimizer_step_between_forward_and_backward_is_refused(guarded):
    model, guard = guarded
    optimizer = MegatronLike(model)
    guard.watch(optimizer)
    loss = sealed_loss(model, guard)
    assert optimizer.step() == (True, None, None)
    assert guard.version == 1
    with pytest.raises(WeightsChanged, match="found weights of version 1, expected version 0"):
        loss.backward()


def test_torch_optimizer_step_is_watched(guarded):
    model, guard = guarded
    optimizer = torch.optim.AdamW(model.parameters())
    guard.watch(optimizer)
    digests = {guard.digest}
    for _ in range(3):
        sealed_loss(model, guard).backward()
        optimizer.step()
        digests.add(guard.digest)
    assert guard.version == 3 and len(digests) == 4


def test_step_on_weights_that_were_changed_before_it_is_refused(guarded):
    """Otherwise the step would give the stray write a version of its own."""
    model, guard = guarded
    guard.watch(optimizer := MegatronLike(model))
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(WeightsChanged, match="'0.bias' has writes"):
        optimizer.step()
    assert guard.version == 0


def test_data_write_needs_the_full_form(guarded):
    """The stated limit of the cheap form: a write through .data has a counter of its own."""
    model, guard = guarded
    stamp = guard.stamp()
    MegatronLike(model).step()
    guard.check(stamp)
    with pytest.raises(WeightsChanged, match="found weights with digest"):
        guard.check(stamp, full=True)
    with pytest.raises(WeightsChanged, match="found weights with digest"):
        guard.export()


def test_swapped_tensors_are_refused():
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    guard = WeightGuard(model.named_parameters)
    stamp = guard.stamp()
    model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data
    with pytest.raises(WeightsChanged, match="address"):
        guard.check(stamp)
    with pytest.raises(WeightsChanged, match="digest"):
        guard.relocate()


def test_rebinding_instead_of_copying_is_refused(guarded):
    model, guard = guarded
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(WeightsChanged, match="'0.weight' has address"):
        guard.stamp()
    with pytest.raises(WeightsChanged, match="an update moved weights"):
        guard.advance()
    assert guard.relocate().version == 0
    guard.stamp()


def test_replaced_added_and_removed_parameters_are_refused(guarded):
    model, guard = guarded
    kept = model[0].weight
    model[0].weight = torch.nn.Parameter(kept.detach().clone())
    with pytest.raises(WeightsChanged, match="'0.weight'"):
        guard.stamp()
    model[0].weight = kept
    guard.stamp()
    model[0].extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(WeightsChanged, match="'0.extra' is new"):
        guard.stamp()
    del model[0].extra, model[2].bias
    with pytest.raises(WeightsChanged, match="gone"):
        guard.stamp()


def test_inference_tensors_are_guarded_by_address_and_digest():
    with torch.inference_mode():
        weight = torch.ones(4)
    guard = WeightGuard(lambda: [("w", weight)])
    stamp = guard.stamp()
    with torch.inference_mode():
        weight.add_(1)
    guard.check(stamp)
    with pytest.raises(WeightsChanged):
        guard.check(stamp, full=True)


def test_checkpoint_round_trip_keeps_version_and_digest(guarded, tmp_path):
    model, guard = guarded
    guard.watch(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    sealed_loss(model, guard).backward()
    optimizer.step()
    torch.save({"weights": model.state_dict(), "version": guard.version, "digest": guard.digest}, tmp_path / "ckpt.pt")

    saved = torch.load(tmp_path / "ckpt.pt")
    fresh = small()
    again = WeightGuard(fresh.named_parameters)
    with pytest.raises(WeightsChanged, match="that of the checkpoint of version 1"):
        again.reload(saved["version"], saved["digest"])
    fresh.load_state_dict(saved["weights"])
    again.reload(saved["version"], saved["digest"])
    assert (again.version, again.digest) == (guard.version, guard.digest)
    sealed_loss(fresh, again).backward()


def test_versions_only_grow(guarded):
    _, guard = guarded
    digest = guard.digest
    guard.advance()
    with pytest.raises(WeightsChanged, match="versions only grow"):
        guard.reload(0, digest)


# ---- the sync


class Engine:
    """Resident weights, and a derived scale as a quantised engine has."""

    def __init__(self):
        torch.manual_seed(1)
        self.model = small()
        self.scale = torch.zeros(1)

    def resident(self):
        yield from self.model.named_parameters()
        yield "scale", self.scale

    def derive(self):
        self.scale.copy_(self.model[0].weight.abs().amax())


def sync(manifest, tensors, receiver):
    receiver.begin(manifest)
    for name, tensor in tensors:
        receiver.put(name, tensor.detach())
    return receiver.commit()


@pytest.fixture
def pair(guarded):
    model, guard = guarded
    with torch.no_grad():
        model[0].weight.add_(0.25)
    guard.advance()
    engine = Engine()
    return model, guard, engine, WeightReceiver(engine.resident, derive=engine.derive), SyncLedger(max_lag=2)


def test_sync_leaves_the_same_bits_and_the_same_tag_on_both_sides(pair):
    model, guard, engine, receiver, ledger = pair
    addresses = [t.data_ptr() for _, t in engine.resident()]
    manifest = Manifest.from_json(Manifest.of(guard).to_json())
    ledger.publish(manifest)
    ledger.confirm(sync(manifest, model.named_parameters(), receiver))
    for (name, ours), (_, theirs) in zip(model.named_parameters(), engine.model.named_parameters(), strict=True):
        assert torch.equal(ours.detach().view(torch.int32), theirs.detach().view(torch.int32)), name
    assert engine.scale.item() == model[0].weight.abs().max().item()
    assert addresses == [t.data_ptr() for _, t in engine.resident()]
    assert receiver.verify() == Tag(1, guard.digest)
    assert ledger.check(receiver.tag(), guard.version) == 0


def test_rollout_of_a_stale_engine_is_refused(pair):
    model, guard, _, receiver, ledger = pair
    ledger.publish(manifest := Manifest.of(guard))
    sync(manifest, model.named_parameters(), receiver)
    for lag in (1, 2):
        guard.advance()
        ledger.publish(Manifest.of(guard))
        assert ledger.check(receiver.tag(), guard.version) == lag
    guard.advance()
    ledger.publish(Manifest.of(guard))
    with pytest.raises(SyncRefused, match="rollout of version 1 at version 4"):
        ledger.check(receiver.tag(), guard.version)


def test_rollout_with_other_weights_under_the_right_version_is_refused(pair):
    _, guard, _, _, ledger = pair
    ledger.publish(Manifest.of(guard))
    with pytest.raises(SyncRefused, match="answered with version 1"):
        ledger.check(Tag(1, "0" * 64), guard.version)
    with pytest.raises(SyncRefused, match="lag of 0 to 2"):
        ledger.check(Tag(2, guard.digest), guard.version)
    with pytest.raises(SyncRefused, match="never published"):
        ledger.check(Tag(0, guard.digest), guard.version)
    with pytest.raises(SyncRefused, match="an engine confirmed"):
        ledger.confirm(Receipt(1, "f" * 64, "e" * 64))


def test_tensor_changed_after_the_manifest_is_refused_and_stops_serving(pair):
    model, guard, _, receiver, _ = pair
    manifest = Manifest.of(guard)
    receiver.begin(manifest)
    with torch.no_grad():
        model[0].weight.view(-1)[3].neg_()
    with pytest.raises(SyncRefused, match="'0.weight'"):
        receiver.put("0.weight", model[0].weight)
    with pytest.raises(SyncRefused, match="no complete set"):
        receiver.tag()


def test_half_a_sync_gives_no_tag_and_can_be_repeated(pair):
    model, guard, _, receiver, _ = pair
    manifest = Manifest.of(guard)
    receiver.begin(manifest)
    receiver.put("0.weight", model[0].weight.detach())
    with pytest.raises(SyncRefused, match="3 tensors did not arrive, first '0.bias'"):
        receiver.commit()
    with pytest.raises(SyncRefused, match="no complete set"):
        receiver.tag()
    sync(manifest, model.named_parameters(), receiver)
    assert receiver.tag().version == 1


def test_nothing_is_served_from_the_begin_to_the_commit_of_the_next_version(pair):
    model, guard, _, receiver, _ = pair
    sync(Manifest.of(guard), model.named_parameters(), receiver)
    guard.advance()
    receiver.begin(Manifest.of(guard))
    with pytest.raises(SyncRefused, match="no complete set"):
        receiver.tag()
    for name, tensor in model.named_parameters():
        receiver.put(name, tensor.detach())
    assert receiver.commit().version == receiver.tag().version == 2


def test_wrong_names_and_repeats_are_refused(pair):
    model, guard, _, receiver, _ = pair
    with pytest.raises(SyncRefused, match="outside a sync"):
        receiver.put("0.weight", model[0].weight.detach())
    receiver.begin(Manifest.of(guard))
    receiver.put("0.weight", model[0].weight.detach())
    with pytest.raises(SyncRefused, match="a second time"):
        receiver.put("0.weight", model[0].weight.detach())
    with pytest.raises(SyncRefused, match="without a line"):
        receiver.put("9.weight", model[0].weight.detach())


def test_older_version_is_refused_and_serving_goes_on(pair):
    model, guard, _, receiver, _ = pair
    manifest = Manifest.of(guard)
    sync(manifest, model.named_parameters(), receiver)
    with pytest.raises(SyncRefused, match="expected more than 1"):
        receiver.begin(manifest)
    assert receiver.tag().version == 1


@pytest.mark.parametrize("fault", ["data", "parameter", "derived"])
def test_rebinding_in_the_engine_is_refused(pair, fault):
    """vllm #48312, #48941: scales that a reload allocates anew, while graphs read the old ones; #41670: the same of an
    FP8 kernel's own tensors, which ended in an illegal access."""
    model, guard, engine, _, _ = pair

    def load(name, tensor):
        target = dict(engine.model.named_parameters())[name]
        if name == "2.weight" and fault == "data":
            target.data = tensor.clone()
        elif name == "2.weight" and fault == "parameter":
            engine.model[2].weight = torch.nn.Parameter(tensor.clone())
        else:
            target.copy_(tensor)

    def derive():
        if fault == "derived":
            engine.scale = engine.model[0].weight.detach().abs().amax().reshape(1)

    receiver = WeightReceiver(engine.resident, load, derive)
    with pytest.raises(SyncRefused, match="copy in place instead of rebinding"):
        sync(Manifest.of(guard), model.named_parameters(), receiver)
    with pytest.raises(SyncRefused, match="no complete set"):
        receiver.tag()


def test_copy_never_casts(pair):
    model, guard, engine, _, _ = pair
    engine.model.bfloat16()
    receiver = WeightReceiver(engine.resident)
    receiver.begin(Manifest.of(guard))
    with pytest.raises(SyncRefused, match="must not cast"):
        receiver.put("0.weight", model[0].weight.detach())


def test_write_during_a_sync_is_read_back(pair):
    """derive() scribbles over a copied tensor: the bytes arrived right and are wrong when read back."""
    model, guard, engine, _, _ = pair
    receiver = WeightReceiver(engine.resident, derive=lambda: engine.model[2].bias.zero_())
    with pytest.raises(SyncRefused, match="'2.bias' reads back"):
        sync(Manifest.of(guard), model.named_parameters(), receiver)


def test_weights_lost_in_sleep_are_found_at_wake_and_synced_again(pair):
    model, guard, engine, receiver, _ = pair
    manifest = Manifest.of(guard)
    sync(manifest, model.named_parameters(), receiver)
    engine.scale.data.zero_()
    with pytest.raises(SyncRefused, match="lost or overwritten"):
        receiver.verify()
    with pytest.raises(SyncRefused, match="no complete set"):
        receiver.tag()
    sync(manifest, model.named_parameters(), receiver)
    receiver.verify()


def test_an_engine_that_sleeps_gives_no_tag_and_takes_no_sync(pair):
    model, guard, _, receiver, _ = pair
    manifest = Manifest.of(guard)
    sync(manifest, model.named_parameters(), receiver)
    for level in (1, 2):
        receiver.asleep(level)
        with pytest.raises(SyncRefused, match=f"a rollout while this engine sleeps at level {level}"):
            receiver.tag()
        with pytest.raises(SyncRefused, match="a sync while"):
            receiver.begin(manifest)
        with pytest.raises(SyncRefused, match="outside a sync"):
            receiver.put("0.weight", model[0].weight.detach())
        receiver.awake()
    with pytest.raises(ValueError, match="level 0"):
        receiver.asleep(0)


def test_weights_kept_in_sleep_are_served_again_if_every_bit_is_there(pair):
    model, guard, engine, receiver, _ = pair
    sync(Manifest.of(guard), model.named_parameters(), receiver)
    receiver.asleep(1)
    receiver.awake()
    assert receiver.tag() == Tag(1, guard.digest)
    receiver.asleep(1)
    engine.scale.data.zero_()
    with pytest.raises(SyncRefused, match="lost or overwritten"):
        receiver.awake()


def test_weights_dropped_in_sleep_are_served_after_the_next_commit_only(pair):
    model, guard, engine, receiver, _ = pair
    manifest = Manifest.of(guard)
    sync(manifest, model.named_parameters(), receiver)
    receiver.asleep(2)
    for _, tensor in engine.resident():
        tensor.data.fill_(float("nan"))
    receiver.awake()
    with pytest.raises(SyncRefused, match="no complete set"):
        receiver.tag()
    older = Manifest(0, manifest.digest, manifest.tensors)
    for _ in range(2):  # sleeping once more, with nothing left to drop, lets no older one in
        with pytest.raises(SyncRefused, match="expected more than 0"):
            receiver.begin(older)
        receiver.asleep(2)
        receiver.awake()
    sync(manifest, model.named_parameters(), receiver)  # no update in between: the same version again
    assert receiver.tag() == Tag(1, guard.digest) and not engine.scale.isnan()


def test_a_sync_that_a_sleep_cut_short_cannot_be_finished(pair):
    model, guard, _, receiver, _ = pair
    receiver.begin(Manifest.of(guard))
    receiver.asleep(1)
    receiver.awake()
    with pytest.raises(SyncRefused, match="outside a sync"):
        receiver.commit()
    with pytest.raises(SyncRefused, match="no complete set"):
        receiver.tag()


def test_manifest_that_was_cut_or_edited_is_refused(pair):
    _, guard, _, _, _ = pair
    manifest = Manifest.of(guard)
    cut = copy.copy(dict(manifest.tensors))
    cut.pop("2.bias")
    with pytest.raises(SyncRefused, match="resend"):
        Manifest.from_json(Manifest(manifest.version, manifest.digest, cut).to_json())


def test_export_under_other_names_has_its_own_digest(pair):
    model, guard, _, _, _ = pair
    renamed = [(f"model.{name}", tensor) for name, tensor in model.named_parameters()]
    manifest = Manifest.of(guard, renamed)
    assert set(manifest.tensors) == {name for name, _ in renamed} and manifest.digest != guard.digest


def test_ledger_refuses_to_publish_backwards(pair):
    _, guard, _, _, ledger = pair
    ledger.publish(manifest := Manifest.of(guard))
    with pytest.raises(SyncRefused, match="advance"):
        ledger.publish(manifest)
    with pytest.raises(ValueError, match="max_lag"):
        SyncLedger(-1)
