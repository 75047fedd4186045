"""`quantization_config` of formats whose values are looked up: AQLM and VPTQ by vectors of
codebooks, EXL3 by a trellis; of FP-Quant, whose inputs are rotated; of EXL2, whose groups have
bits of their own; of SpQR, whose scales are quantized too; and HIGGS by pairs of rotated inputs."""

from __future__ import annotations

import re

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import (
    EVERY,
    Codebook,
    Numbers,
    Rule,
    StoredQuantization,
    bits_of,
    everything,
    plain_modules,
)


def aqlm(config: ConfigReader) -> StoredQuantization:
    """AQLM (Egiazarian et al. 2024): a vector of outputs x inputs is the sum of one of each
    codebook."""
    book = Codebook(
        outputs=config.int("out_group_size", 1, ge=1),
        inputs=config.int("in_group_size", 8, ge=1),
        books=config.int("num_codebooks", 1, ge=1, le=16),
        bits=config.int("nbits_per_codebook", 16, ge=1, le=16),
    )
    bits = -(-book.bits * book.books // (book.outputs * book.inputs))
    numbers = Numbers(arrangement="aqlm", bits=bits, codebook=book)
    plain = config.list("linear_weights_not_to_quantize", (), of=str)
    modules = tuple(name.removesuffix(".weight") for name in plain)
    rules = (Rule(targets=modules, numbers=None), Rule(targets=(EVERY,), numbers=numbers))
    return StoredQuantization(method="aqlm", rules=rules)


def vptq(config: ConfigReader) -> StoredQuantization:
    """VPTQ (Liu et al. 2024): vectors of outputs from codebooks, with a second codebook for what is
    left; by the name of a module (`config_for_layers`), or by its last part."""
    rules = [Rule(targets=plain_modules(config), numbers=None)]
    for key in ("config_for_layers", "shared_layer_config"):
        section = config.section(key)
        for name in section.raw if section is not None else ():
            assert section is not None
            rules.append(
                Rule(targets=(name,), numbers=_vptq_numbers(section.required_section(name)))
            )
    if len(rules) == 1:
        raise config.wrong("config_for_layers", "a section for each module")
    return StoredQuantization(method="vptq", rules=tuple(rules))


def _vptq_numbers(entry: ConfigReader) -> Numbers:
    if not entry.bool("is_indice_packed", False):
        raise entry.wrong("is_indice_packed", "true (indices that are not packed: save it again)")
    entry.choice("vector_quant_dim", ("out",), "out")
    outlier_outputs, outputs = entry.list("vector_lens", of=int, length=2)
    if not 1 <= outputs <= 256 or outlier_outputs > 256:
        raise entry.wrong("vector_lens", "lengths of 1 to 256, the second of all but outliers")
    centroids = entry.list("num_centroids", of=int, length=2)
    residual = entry.list("num_res_centroids", (-1, -1), of=int, length=2)
    if residual[0] > 0:
        raise entry.wrong("num_res_centroids", "-1 for outliers")
    outliers = entry.int("outlier_size", 0, ge=0) if centroids[0] > 0 else 0
    if outliers and outlier_outputs < 1:
        raise entry.wrong("vector_lens", "a length for outliers, of which there are some")
    book = Codebook(
        outputs=outputs,
        inputs=1,
        bits=_bits(entry, "num_centroids", centroids[1]),
        books=entry.int("group_num", 1, ge=1),
        residual_bits=_bits(entry, "num_res_centroids", residual[1]) if residual[1] > 0 else 0,
        run=entry.int("group_size", ge=1),
        outliers=outliers,
        outlier_outputs=outlier_outputs if outliers else 0,
        num_outputs=entry.int("out_features", -1, ge=-1),
    )
    bits = -(-(book.bits + book.residual_bits) // outputs)
    return Numbers(arrangement="vptq", bits=bits, codebook=book)


def _bits(entry: ConfigReader, key: str, count: int) -> int:
    """Of an index of so many."""
    bits = count.bit_length() - 1
    if count < 2 or count != 1 << bits or bits > 16:
        raise entry.wrong(key, "powers of two, from 2 to 65536")
    return bits


def exl2(config: ConfigReader) -> StoredQuantization:
    """EXL2 (exllamav2): integers of 2 to 8 bits; which ones, each weight's tensors say."""
    return everything("exl2", Numbers(arrangement="exl2", bits=_about(config)), ())


def exl3(config: ConfigReader) -> StoredQuantization:
    """EXL3 (exllamav3): a trellis of 1 to 8 bits a value; how many, each weight's tensors say."""
    return everything("exl3", Numbers(arrangement="exl3", bits=_about(config)), ())


def fp_quant(config: ConfigReader) -> StoredQuantization:
    """FP-Quant: MXFP4 or NVFP4 of rotated inputs, or the floats that they stand for; or the plain
    weights that these are to be made of."""
    dtype = config.choice("forward_dtype", ("mxfp4", "nvfp4"), "nvfp4")
    if config.bool("store_master_weights", False):
        return StoredQuantization(method="fp_quant", rules=())
    if config.bool("pseudoquantization", False):
        numbers = Numbers(arrangement="rotated-floats", bits=16)
    else:
        group = (1, 32 if dtype == "mxfp4" else 16)
        numbers = Numbers(arrangement=f"rotated-{dtype}", bits=4, group=group)
    return everything("fp_quant", numbers, plain_modules(config))


def spqr(config: ConfigReader) -> StoredQuantization:
    """SpQR (Dettmers et al. 2023): 3 bits in tiles of 16 x 16, whose scales and zero points have 3
    bits too, and floats that are added where that is too little."""
    bits_of(config, (3,), 3)
    for key in ("beta1", "beta2"):
        if config.int(key, 16) != 16:
            raise config.wrong(key, "16")
    return everything("spqr", Numbers(arrangement="spqr", bits=3), plain_modules(config))


def higgs(config: ConfigReader) -> StoredQuantization:
    """HIGGS (Malinovskii et al. 2024): pairs of inputs of rotated blocks, looked up in one table.
    How they lie follows from the kernel that FLUTE chose for each module (`tune_metadata`)."""
    bits = bits_of(config, (2, 3, 4), 4)
    size, rotated = config.int("group_size", 256), config.int("hadamard_size", 512)
    if size not in (64, 128, 256):
        raise config.wrong("group_size", "64, 128 or 256")
    if rotated % size or rotated & (rotated - 1) or rotated < 1:
        raise config.wrong("hadamard_size", f"a power of two that groups of {size} divide")
    modules = config.required_section("tune_metadata")
    rules = [Rule(targets=plain_modules(config), numbers=None)]
    for name in modules.raw:
        entry = modules.required_section(name)
        template = entry.int("template_id", ge=0, le=143 if bits == 4 else 35)
        # FLUTE 0.4 has twelve kernels for each size of tiles, of 4 bits four times as many
        tile = 64 if template // (16 if bits == 4 else 4) % 3 == 0 else 32
        if bits == 3 and tile != 32:
            raise entry.wrong("template_id", "a kernel with tiles of 32, of 3 bits")
        book = Codebook(outputs=1, inputs=2, bits=bits, tile=tile, rotated=rotated)
        numbers = Numbers(arrangement="higgs", bits=bits, group=(1, size), codebook=book)
        rules.append(Rule(targets=(f"re:{re.escape(name)}$",), numbers=numbers))
    return StoredQuantization(method="higgs", rules=tuple(rules))


def _about(config: ConfigReader) -> int:
    """What `bits` says of the mean, for messages."""
    return max(1, min(8, round(config.float("bits", 4.0, ge=0.5, le=16))))
