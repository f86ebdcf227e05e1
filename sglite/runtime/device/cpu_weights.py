"""How the CPU keeps the weight of a projection.

float32 weights exist twice, for two kinds of product, as one layout is bad for the other (SmolLM2, one core, cold):

    1 row       MKL's matrix-vector product streams at the speed of memory if the output runs along the rows it reads:
                wide weights are kept transposed. 12 GB/s, where oneDNN's packed layout has 8 and the plain one 9.
    more rows   oneDNN's packed layout: 2 to 3 times the plain product at 4 to 16 rows.

Where the second copy does not fit (see CpuOps), there is the packed one alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

_BLOCK_ROWS = 16  # rows for which oneDNN chooses its layout; measured best or within 15 % for 1 to 300
_SPLIT_BYTES = 1 << 20  # of a weight below which handing work to a second thread costs more than it saves


class CpuWeight(Protocol):
    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x  # [T, in]  @ weight.T + bias -> [T, out]."""
        ...

    def linear_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual + x @ weight.T + bias; may be written into residual."""
        ...


class PlainWeight:
    """Any type, as it was loaded."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight, bias)

    def linear_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.linear(x, bias))


def can_pack(weight: torch.Tensor) -> bool:
    """oneDNN is there (this is the operator that torch.compile uses for frozen weights) and knows the type here."""
    onednn = torch.backends.mkldnn
    return weight.dtype == torch.float32 and onednn.is_available() and bool(onednn.enabled)


class OneDnnWeight:
    """float32, reordered once into oneDNN's blocked layout; `single`: the copy for one row."""

    def __init__(self, weight: torch.Tensor, single: SingleRowWeight | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCK_ROWS)
        self._single = single

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._single is not None and x.shape[0] == 1:
            return self._single.product(x, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def linear_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        if self._single is not None and x.shape[0] == 1:
            return self._single.product(x, residual if bias is None else residual + bias)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, bias, "add")


class SingleRowWeight:
    """float32 for products with one row. Each thread multiplies with one slice of the outputs."""

    def __init__(self, weight: torch.Tensor) -> None:
        outputs, inputs = weight.shape
        threads = torch.get_num_threads()
        slices = threads if outputs % threads == 0 and weight.nbytes >= _SPLIT_BYTES else 1
        if outputs >= inputs:
            self.columns = weight.t().contiguous()  # [in, out]; shares memory with a weight that is stored like this
            self._slices = self.columns.view(inputs, slices, -1).transpose(0, 1)
        else:
            self.columns = weight.t()
            self._slices = weight.view(slices, -1, inputs).transpose(1, 2)
        # both: [slices, in, out / slices]

    def product(self, x: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
        """x  # [1, in]  @ weight.T + addend  # [out] or [1, out]  -> [1, out]."""
        slices, inputs, outputs = self._slices.shape
        x = x.expand(slices, 1, inputs)
        if addend is None:
            return torch.bmm(x, self._slices).view(1, -1)
        return torch.baddbmm(addend.view(slices, 1, outputs), x, self._slices).view(1, -1)


class Int8Weight:
    """8 bits a weight with one float32 scale per output, rounded to nearest; activations are bfloat16 in the product.

    A quarter of float32's memory and an eighth of what OneDnnWeight keeps, not faster: 0.75 times the speed of float32
    at one row, half at 16. Every row is computed by itself, so an answer does not depend on its batch mates (a product
    that quantises activations would be twice as fast, and does). On 200 tokens of English, SmolLM2's mean negative log
    likelihood moves by less than 0.01, a token's log probability by 0.09 in the mean; 96 % of the best tokens agree.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._scale = weight.float().abs().amax(dim=1).clamp_(min=1e-12).div_(127)
        self._weight = (weight.float() / self._scale[:, None]).round_().to(torch.int8)
        self._ones = torch.ones(weight.shape[0], dtype=torch.bfloat16)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = torch._weight_int8pack_mm(x.bfloat16(), self._weight, self._ones).to(x.dtype).mul_(self._scale)
        return product if bias is None else product.add_(bias)

    def linear_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.linear(x, bias))
