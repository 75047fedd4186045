"""How a weight lies in a checkpoint: the tensors that stand for it by name and shape."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from headrace.base.config.quantization import Numbers
from headrace.base.config.quantized_shapes import Shape, StoredMembers


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a weight is stored. `roles`: role -> the tensor's name, with {weight} or {module};
    "values" is what it is recognised by, if it has one of `dtypes`. `optional` roles may lack.
    `shape` works out the weight's shape; `expected` the shapes of its members; `group`, where the
    tensors say it and not the config, how many inputs share a scale. `marked`: a role without which
    a tensor of one of `dtypes` is plain. `elsewhere`: another name of roles, where the first is not
    there."""

    roles: Mapping[str, str]
    dtypes: tuple[str, ...]
    shape: Callable[[StoredMembers], Shape]
    optional: tuple[str, ...] = ()
    expected: Callable[[Shape, Numbers], Mapping[str, tuple[Shape, ...]]] = lambda shape, numbers: {}
    group: Callable[[StoredMembers], int] | None = None
    marked: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def weight_of(self, tensor: str) -> str | None:
        """The weight whose values a tensor of this name holds."""
        template = self.roles["values"]
        leaf = template.removeprefix("{weight}").removeprefix("{module}")
        if not tensor.endswith(leaf):
            return None
        stem = tensor.removesuffix(leaf)
        return f"{stem}.weight" if template.startswith("{module}") else stem

    def names(self, weight: str, headers: Container[str] = ()) -> dict[str, str]:
        """Role -> tensor, of this weight, among the tensors that there are."""
        module = weight.removesuffix(".weight")
        names = {}
        for role, template in self.roles.items():
            names[role] = template.format(weight=weight, module=module)
            other = self.elsewhere.get(role, "").format(weight=weight, module=module)
            if names[role] not in headers and other in headers:
                names[role] = other
        return names
