"""Trainer -> engine weight sync: in place, one version and one digest on both sides.

Invariant: a rollout's tag (version, digest) names exactly the bytes the trainer exported under that version, and every
tensor the engine serves from lies where it lay when its CUDA graphs were captured. It holds because the engine digests
each tensor as it arrives, before it is written; reads plainly copied tensors back after the last write; compares all
addresses; and gives no tag from `begin` until `commit` has passed all of it. A failed sync leaves no tag to give.
An engine that sleeps gives none either and takes no sync: its tensors have addresses and no memory. One that dropped
its weights (level 2) gives none until the next commit; one that kept them on the host (level 1) shows every bit first.

    trainer                                   engine
    manifest = Manifest.of(guard)
    ledger.publish(manifest)         ------>  receiver.begin(manifest)
    for name, tensor in ...          ------>  receiver.put(name, tensor)
    ledger.confirm(receipt)          <------  receiver.commit()
    ledger.check(tag, version)       <------  a rollout, with receiver.tag() taken when it started
"""
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from .digest import TensorDigest, tensor_digests, total_digest
from .version_guard import WeightGuard


class SyncRefused(RuntimeError):
    """The two sides do not hold the same weights, or cannot show that they do."""


class Tag(NamedTuple):
    version: int
    digest: str


class Receipt(NamedTuple):
    version: int
    digest: str  # of the tensors as they arrived
    resident: str  # of everything the engine serves from, derived tensors included


@dataclass(frozen=True)
class Manifest:
    version: int
    digest: str
    tensors: Mapping[str, TensorDigest]

    @classmethod
    def of(cls, guard: WeightGuard, exported: Iterable[tuple[str, torch.Tensor]] | None = None) -> "Manifest":
        """Of the guarded weights, or of what is sent in their place when the export renames or gathers them."""
        stamp, digests = guard.export()
        if exported is not None:
            digests = tensor_digests(exported)
        return cls(stamp.version, total_digest(digests), digests)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        data = json.loads(text)
        tensors = {name: TensorDigest(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in
                   data["tensors"].items()}
        if total_digest(tensors) != data["digest"]:
            raise SyncRefused("found a manifest whose total is not that of its lines; it was cut or edited: resend it")
        return cls(data["version"], data["digest"], tensors)


class WeightReceiver:
    """The engine's side. `resident()` lists every tensor it serves from, derived ones (scales, requantised) included.

    `load(name, tensor)` writes one received tensor into the resident ones in place, where the engine's layout differs
    from the trainer's; without it a tensor is copied to the resident one of its name. `derive()` recomputes derived
    tensors in place after the last load.
    """

    def __init__(
        self,
        resident: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        load: Callable[[str, torch.Tensor], None] | None = None,
        derive: Callable[[], None] | None = None,
    ):
        self._resident, self._load, self._derive = resident, load, derive
        self._addresses = self._where()
        self._incoming: Manifest | None = None
        self._missing: set[str] = set()
        self._receipt: Receipt | None = None  # None: serving is refused
        self._last_version: int | None = None
        self._asleep = 0  # the level it sleeps at

    def begin(self, manifest: Manifest) -> None:
        """Stop serving and expect every tensor of the manifest. A manifest that is not newer changes nothing."""
        self._refuse_asleep("a sync")
        if self._last_version is not None and manifest.version <= self._last_version:
            raise SyncRefused(
                f"found weights of version {manifest.version}, expected more than {self._last_version}, which this "
                "engine holds; the sender is behind: restart it from the last checkpoint, or restart this engine"
            )
        self._receipt, self._incoming, self._missing = None, manifest, set(manifest.tensors)

    @torch.no_grad()
    def put(self, name: str, tensor: torch.Tensor) -> None:
        manifest = self._expecting()
        if name not in self._missing:
            state = "a second time" if name in manifest.tensors else "without a line in the manifest"
            raise SyncRefused(f"found {name!r} {state}; send each tensor of the manifest once")
        found = tensor_digests([(name, tensor)])[name]
        if found != manifest.tensors[name]:
            raise SyncRefused(
                f"found {name!r} as {found}, expected {manifest.tensors[name]}; it was changed after the manifest or "
                "on the way: export again"
            )
        if self._load is not None:
            self._load(name, tensor)
        else:
            self._copy(name, tensor)
        self._missing.discard(name)

    @torch.no_grad()
    def commit(self) -> Receipt:
        manifest = self._expecting()
        if self._missing:
            raise SyncRefused(f"{len(self._missing)} tensors did not arrive, first {min(self._missing)!r}; send all")
        if self._derive is not None:
            self._derive()
        self._check_addresses()
        resident = tensor_digests(self._resident())
        if self._load is None:
            self._check_copies(manifest, resident)
        self._receipt = Receipt(manifest.version, manifest.digest, total_digest(resident))
        self._incoming, self._last_version = None, manifest.version
        return self._receipt

    def tag(self) -> Tag:
        """What a rollout that starts now must carry."""
        self._refuse_asleep("a rollout")
        if self._receipt is None:
            raise SyncRefused("this engine holds no complete set of weights; finish a sync before the next rollout")
        return Tag(self._receipt.version, self._receipt.digest)

    def verify(self) -> Tag:
        """After a wake, or at any time: every resident bit and address is still that of the last commit."""
        tag = self.tag()
        self._check_addresses()
        found = total_digest(tensor_digests(self._resident()))
        if found != self._receipt.resident:
            expected, self._receipt, self._last_version = self._receipt.resident, None, None
            raise SyncRefused(
                f"found resident weights with digest {found[:16]}..., expected {expected[:16]}..., that of version "
                f"{tag.version}; they were lost or overwritten: sync again"
            )
        return tag

    def asleep(self, level: int) -> None:
        """Before the engine sleeps: at level 1 its weights go to the host, at level 2 they are dropped."""
        if level not in (1, 2):
            raise ValueError(f"found sleep level {level}, expected 1 (weights kept on the host) or 2 (dropped)")
        self._asleep, self._incoming = level, None
        if level == 2 and self._receipt is not None:
            self._receipt = None
            self._last_version -= 1  # what was dropped may come again, nothing older

    def awake(self) -> None:
        """After the engine woke. Where the weights were kept, raises unless every bit and address is that of before."""
        self._asleep = 0
        if self._receipt is not None:
            self.verify()

    def _refuse_asleep(self, what: str) -> None:
        if self._asleep:
            raise SyncRefused(f"found {what} while this engine sleeps at level {self._asleep}; wake it first: its "
                              "tensors have no memory")

    def _expecting(self) -> Manifest:
        if self._incoming is None:
            raise SyncRefused("found a tensor or a commit outside a sync; call begin(manifest) first")
        return self._incoming

    def _where(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._resident()}

    def _check_addresses(self) -> None:
        now = self._where()
        names = self._addresses.keys() | now.keys()
        moved = sorted(name for name in names if self._addresses.get(name) != now.get(name))
        if moved:
            self._receipt = None
            raise SyncRefused(
                f"{len(moved)} resident tensors lie elsewhere than at start-up, first {moved[0]!r}; captured graphs "
                "still read the old address: copy in place instead of rebinding"
            )

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        target = dict(self._resident()).get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            here = "no such tensor" if target is None else f"{target.dtype} {tuple(target.shape)}"
            raise SyncRefused(
                f"found {name!r} as {tensor.dtype} {tuple(tensor.shape)}, this engine has {here}; a copy must not "
                "cast: pass a `load` that applies the deployment's rule"
            )
        target.copy_(tensor)

    @staticmethod
    def _check_copies(manifest: Manifest, resident: Mapping[str, TensorDigest]) -> None:
        for name, expected in manifest.tensors.items():
            if resident[name] != expected:
                raise SyncRefused(
                    f"{name!r} reads back as {resident[name]}, expected {expected}; something else writes to it: find "
                    "it (often `derive`), then sync again"
                )


class SyncLedger:
    """The trainer's side: which digest each version has, which engines confirmed, and how old a rollout may be."""

    def __init__(self, max_lag: int):
        if max_lag < 0:
            raise ValueError(f"found max_lag {max_lag}, expected 0 (synchronous) or more")
        self.max_lag = max_lag
        self.digests: dict[int, str] = {}

    def publish(self, manifest: Manifest) -> None:
        if self.digests and manifest.version <= max(self.digests):
            raise SyncRefused(
                f"found version {manifest.version}, expected more than {max(self.digests)}; advance() before an export"
            )
        self.digests[manifest.version] = manifest.digest
        for version in [v for v in self.digests if v < manifest.version - self.max_lag]:
            del self.digests[version]

    def confirm(self, receipt: Receipt) -> None:
        self._check_digest(receipt.version, receipt.digest, "an engine confirmed")

    def check(self, tag: Tag, version: int) -> int:
        """The lag, in versions, of a rollout trained on at `version`; raises if its weights are not the trainer's."""
        lag = version - tag.version
        if not 0 <= lag <= self.max_lag:
            raise SyncRefused(
                f"found a rollout of version {tag.version} at version {version}, expected a lag of 0 to "
                f"{self.max_lag}; drop it, and sync the engine"
            )
        self._check_digest(tag.version, tag.digest, "a rollout was answered with")
        return lag

    def _check_digest(self, version: int, digest: str, what: str) -> None:
        known = self.digests.get(version)
        if known != digest:
            expected = "none: never published or too old" if known is None else f"{known[:16]}..."
            raise SyncRefused(
                f"{what} version {version} with digest {digest[:16]}..., expected {expected}; refuse it and sync again"
            )
