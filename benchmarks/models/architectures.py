"""Small models of many architectures, with inputs of the right kind.

Configurations are made from the fields of each configuration class: sizes are set by the name of
the field, nested configurations in the same way. Few types need more (`OVERRIDES`).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

TASKS = [
    *(
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "CAUSAL_LM",
        "MASKED_LM",
        "SEQUENCE_CLASSIFICATION",
    ),
    *("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "CTC"),
    *("MASKED_IMAGE_MODELING", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION"),
    *("TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "DEPTH_ESTIMATION", "BACKBONE"),
]
"""Mappings of transformers. A model type has one row, in the first mapping that has it."""

BATCH, LENGTH, TARGET_LENGTH = 4, 9, 7
VOCABULARY, ORDINARY = 64, range(3, 48)
"""Tokens of the models, and those of the examples: not the special ones."""
IMAGE, PATCH = 32, 8

LAYERS = 4


def _table(text: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(text.split(), value)


SIZES: dict[str, Any] = {
    **_table("hidden_size d_model n_embd embed_dim dim emb_dim embedding_size d_embed", 32),
    **_table(
        "word_embed_proj_dim input_embedding_size block_dim lru_width attention_hidden_size", 32
    ),
    **_table("decoder_hidden_size encoder_hidden_size output_hidden_size projection_dim", 32),
    **_table("encoder_embed_dim decoder_embed_dim hidden_dim d_hidden rescale_every", 32),
    **_table("num_attention_heads n_head n_heads num_heads encoder_attention_heads", 4),
    **_table("decoder_attention_heads decoder_num_attention_heads num_decoder_attention_heads", 4),
    **_table("encoder_num_attention_heads num_encoder_attention_heads attention_heads", 4),
    **_table("num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num", 2),
    **_table("encoder_num_key_value_heads decoder_num_key_value_heads", 4),
    **_table("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers", LAYERS),
    **_table("num_decoder_layers num_encoder_layers encoder_num_hidden_layers depth", LAYERS),
    **_table("decoder_num_hidden_layers speech_encoder_layers num_hidden_groups", LAYERS),
    **_table("intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner", 48),
    **_table("ffn_hidden_size ff_dim dff d_inner inner_dim hidden_features", 48),
    **_table("moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size", 24),
    **_table("shared_intermediate_size moe_shared_expert_intermediate_size", 24),
    **_table("head_dim v_head_dim kv_channels d_kv d_head head_size attention_head_size", 8),
    **_table("linear_key_head_dim linear_value_head_dim index_head_dim global_head_dim", 8),
    **_table("linear_num_key_heads index_n_heads", 2),
    **_table("linear_num_value_heads mamba_n_heads mamba_num_heads", 4),
    **_table("qk_rope_head_dim qk_nope_head_dim rotary_dim", 4),
    **_table("kv_lora_rank q_lora_rank o_lora_rank", 16),
    **_table("num_experts n_routed_experts num_local_experts moe_num_experts", 4),
    **_table("num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts", 2),
    **_table("n_group topk_group num_expert_group", 1),
    **_table("first_k_dense_replace num_dense_layers", 1),
    **_table("max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length", 64),
    **_table("max_target_positions max_source_positions context_length seq_length", 64),
    **_table("num_mel_bins input_feat_per_channel feature_size num_mel_bands", 16),
    **_table("mamba_d_state state_size ssm_state_size", 8),
    **_table("classifier_proj_size codevector_dim proj_codevector_dim xvector_output_dim", 16),
    **_table("num_conv_pos_embeddings", 16),
    **_table("num_conv_pos_embedding_groups", 4),
    **_table("image_size img_size pretrained_image_size", IMAGE),
    **_table("patch_size", PATCH),
    **_table("num_frames", 4),
    **_table("tubelet_size", 2),
    **_table("sliding_window attention_window local_attention window_size_text", 6),
    **_table("fusion_hidden_size decoder_channels auxiliary_channels", 16),
    **_table("pad_token_id", 0),
    **_table("bos_token_id decoder_start_token_id cls_token_id", 1),
    **_table("eos_token_id sep_token_id", 2),
}
"""Values of fields whose default is another integer."""

NEEDED = ("num_experts_per_tok", "n_routed_experts", "moe_intermediate_size")
"""Fields whose default may be None, with which the model cannot run."""

LISTS: dict[str, Callable[[int], list[int]]] = {
    "hidden_sizes": lambda n: [16 * (i + 1) for i in range(n)],
    "neck_hidden_sizes": lambda n: [16 * (i + 1) for i in range(n)],
    "embed_dims": lambda n: [16 * (i + 1) for i in range(n)],
    "num_attention_heads": lambda n: [2] * n,
    "num_heads": lambda n: [2] * n,
    "depths": lambda n: [2] * n,
    "layers_to_sample": lambda n: [2] * n,
    "num_conv_layers": lambda n: [2] * n,
    "conv_dim": lambda n: [16] * n,
}
"""Fields that have one number for each stage."""

KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
"""Fields that have one name for each layer."""

OFF = ("layerdrop", "mask_time_prob", "mask_feature_prob", "router_jitter_noise", "jitter_noise")
"""Fields of features that decide by random numbers of NumPy, or which layers run: off."""

SWIN = {"depths": [2, 2, 2], "num_heads": [2, 2, 2], "window_size": 2}
HYBRID = ["mamba", "attention"] * 2
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "diffllama": {"attention_dropout": 0.0},  # it has none
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "maskformer-swin": SWIN,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": HYBRID},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "mpt": {"attn_pdrop": 0},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4},
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
    "lilt": {"hidden_size": 48},
    "bit": {"num_groups": 4},
}
"""Fields by model type, or by the name of a configuration class."""


@dataclass(frozen=True)
class Row:
    """A class of models."""

    source: str
    kind: str
    task: str
    name: str


@dataclass(frozen=True)
class Case:
    """A model and a batch of its inputs."""

    model: nn.Module
    example: Any


class NotBuiltError(Exception):
    """A model cannot be built small, or does not run."""


def rows() -> list[Row]:
    """Return the classes of transformers, one for each model type."""
    from transformers.models.auto import modeling_auto  # slow

    found: dict[str, Row] = {}
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind, name in mapping.items():
            name = name[0] if isinstance(name, (tuple, list)) else name
            found.setdefault(kind, Row("transformers", kind, task.lower(), name))
    return list(found.values())


# --- configurations ----------------------------------------------------------------------------


def small_config(cls: type, extra: dict[str, Any] | None = None) -> Any:
    """Return a configuration with small sizes."""
    given = dict(extra or {})
    for known in (cls.__name__, getattr(cls, "model_type", "")):
        given = {**OVERRIDES.get(known, {}), **given}
    try:
        default = cls()
    except Exception:  # some need their parts
        default = None
    chosen: dict[str, Any] = {}
    tokens = itertools.count(VOCABULARY - 1, -1)
    fields = {field.name for field in dataclasses.fields(cls)}
    for field in dataclasses.fields(cls):
        value = _plain_default(field)
        nested = getattr(default, "__dict__", {}).get(field.name)
        if hasattr(nested, "to_dict") and field.name not in given:
            chosen[field.name] = small_config(type(nested))
            continue
        if field.name in KINDS and _is_kinds(nested):
            chosen[field.name] = _some_of_each(nested)
            continue
        small = _small(field.name, value, tokens)
        if field.name == "num_key_value_heads" and "qk_rope_head_dim" in fields:
            small = SIZES["num_attention_heads"]  # latent attention has no groups
        if field.name == "head_dim" and "qk_rope_head_dim" in fields:
            small = SIZES["qk_rope_head_dim"] if value is not None else None
        if small is not None and small != value:
            chosen[field.name] = small
    return cls(**{**chosen, **given})


def _is_kinds(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > LAYERS and isinstance(value[0], str)


def _some_of_each(kinds: Any) -> list[str]:
    """Return the kinds of the first layers, and at least one layer of each kind."""
    chosen = list(kinds[:LAYERS])
    for place, kind in enumerate(x for x in dict.fromkeys(kinds) if x not in chosen):
        chosen[LAYERS - 1 - place] = kind
    return chosen


def _plain_default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _small(name: str, value: Any, tokens: Iterator[int]) -> Any:
    """Return a small value for a field, or None to leave it."""
    if any(x in name for x in OFF):
        return 0.0
    if name == "apply_spec_augment":
        return False
    if ("dropout" in name or "pdrop" in name or name == "drop_path_rate") and _is_number(value):
        return 0.1
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
        if name in LISTS:
            return LISTS[name](len(value))
        if name in ("image_size", "patch_size"):
            return [SIZES[name]] * len(value)
        return None
    if name in ("pad_token_id", "bos_token_id", "eos_token_id") and not isinstance(value, list):
        return SIZES[name]
    if value is None and name in NEEDED:
        return SIZES[name]
    if type(value) is not int or (name == "patch_size" and value <= PATCH):
        return None
    if name in SIZES:
        return SIZES[name]
    if "vocab_size" in name or name == "vocabulary_size":
        return VOCABULARY if value > VOCABULARY else None
    if "token" in name and value >= VOCABULARY:
        return next(tokens)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- models ------------------------------------------------------------------------------------


def build(row: Row) -> Case:
    """Build a model in float64, with an example of four samples.

    Raises:
        NotBuiltError: It cannot be built small, or does not run in float64.
    """
    torch.manual_seed(0)
    try:
        model = _transformers(row) if row.source == "transformers" else _vision(row)
    except Exception as error:  # classes of models raise many
        raise NotBuiltError(f"not built: {_line(error)}") from error
    count = sum(x.numel() for x in model.parameters())
    if count > 60_000_000:
        raise NotBuiltError(f"not built: {count} parameters")
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            # Parameters that begin as zeros hide what is behind them.
            parameter.add_(torch.randn_like(parameter) * 0.02)
    failures = []
    for example in _examples(row, model):
        try:
            for tried in (copy.deepcopy(model), without_caches(copy.deepcopy(model))):
                _try(tried, example)  # a copy, as some models keep what they computed
        except Exception as error:  # the next example may fit
            failures.append(_line(error))
            continue
        return Case(model, example)
    raise NotBuiltError(f"does not run: {failures[0] if failures else 'unknown inputs'}")


def without_caches(model: nn.Module) -> nn.Module:
    """Turn caches of keys and values off in all of a model's configurations; return the model."""

    def disable(config: Any) -> None:
        if getattr(config, "use_cache", None):
            config.use_cache = False
        for value in vars(config).values():
            if hasattr(value, "to_dict"):
                disable(value)

    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            disable(config)
    return model


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


def _try(model: nn.Module, example: Any) -> None:
    """Run a model and its gradients in both modes."""
    for training in (False, True):
        model.train(training)
        output = model(**example) if isinstance(example, dict) else model(example)
        total = sum(
            x.double().sum()
            for x in tensors_of(output)
            if x.is_floating_point() and x.requires_grad
        )
        if not isinstance(total, Tensor):
            raise NotBuiltError("no output has a gradient")
        total.backward()  # type: ignore[no-untyped-call]  # torch's
        model.zero_grad()


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for each in value.values() for x in tensors_of(each)]
    if isinstance(value, (list, tuple)):
        return [x for each in value for x in tensors_of(each)]
    if dataclasses.is_dataclass(value):
        return [
            x for f in dataclasses.fields(value) for x in tensors_of(getattr(value, f.name, None))
        ]
    return []


def _transformers(row: Row) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = small_config(CONFIG_MAPPING[row.kind])
    cls = getattr(transformers, row.name)
    config_class = cls.config_class
    if not isinstance(config, config_class):  # a part of the type's configuration
        config = small_config(config_class)
    # The default, grouped matrix products, is not there in float64.
    model = cls._from_config(config, experts_implementation="eager")
    return cast(nn.Module, model)


def _vision(row: Row) -> nn.Module:
    if row.source == "torchvision":
        import torchvision

        if row.name.startswith("vit"):  # the smallest has 86 million parameters
            made = torchvision.models.VisionTransformer(IMAGE, PATCH, LAYERS, 4, 32, 48, 0.1)
        else:
            made = torchvision.models.get_model(row.name, weights=None, num_classes=10)
    else:
        import timm

        made = _timm(timm.create_model, row.name)
    return cast(nn.Module, made)


def _timm(create: Callable[..., nn.Module], name: str) -> nn.Module:
    """Build a model of timm with dropout, and of small images where it asks for their size."""
    given: dict[str, Any] = {"num_classes": 10, "drop_rate": 0.1, **SMALLER_TIMM.get(name, {})}
    for more in ({"img_size": 64, "drop_path_rate": 0.1}, {"drop_path_rate": 0.1}, {}):
        try:
            return create(name, **given, **more)
        except TypeError:  # it has no such argument
            continue
    return create(name, **given, img_size=64)


# --- examples ----------------------------------------------------------------------------------


def ids(length: int, batch: int = BATCH) -> Tensor:
    """Return ordinary tokens."""
    return torch.randint(ORDINARY.start, ORDINARY.stop, (batch, length))


def _mask(length: int) -> Tensor:
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, length - 3 :] = 0
    return mask


def _examples(row: Row, model: nn.Module) -> Iterator[Any]:
    if row.source != "transformers":
        for side in (getattr(model, "image_size", 64), 64, 96, 128, 224, 240, 256):
            yield torch.randn(BATCH, 3, side, side)
        return
    names = set(inspect.signature(model.forward).parameters)
    for base in _main_inputs(row, model, names):
        yield _with_decoder(base, names, model)


def _with_decoder(base: dict[str, Tensor], names: set[str], model: nn.Module) -> dict[str, Tensor]:
    config = getattr(model, "config", None)
    if "decoder_input_ids" in names:
        base["decoder_input_ids"] = ids(TARGET_LENGTH)
        if "decoder_attention_mask" in names:
            base["decoder_attention_mask"] = _mask(TARGET_LENGTH)
    elif "decoder_input_values" in names:
        bins = getattr(config, "num_mel_bins", 16)
        base["decoder_input_values"] = torch.randn(BATCH, TARGET_LENGTH, bins)
    return base


def _main_inputs(row: Row, model: nn.Module, names: set[str]) -> Iterator[dict[str, Tensor]]:
    config: Any = getattr(model, "config", None)
    if "input_ids" in names:
        yield from _text(model, names)
    if "pixel_values" in names or "pixel_values_videos" in names:
        name = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
        yield from _images(row, config, name)
    for name in ("input_values", "input_features", "audio_values"):
        if name in names:
            for shape in _audio(config):
                yield _masked(name, torch.randn(*shape), names)


def _text(model: nn.Module, names: set[str]) -> Iterator[dict[str, Tensor]]:
    base = {"input_ids": ids(LENGTH)}
    if "attention_mask" in names:
        base["attention_mask"] = _mask(LENGTH)
    if "bbox" in names:
        corner = torch.randint(0, 20, (BATCH, LENGTH, 2))
        base["bbox"] = torch.cat([corner, corner + 5], -1)
    yield base
    if "visual_feats" in names:
        config: Any = model.config
        yield {
            **base,
            "visual_feats": torch.randn(BATCH, 5, config.visual_feat_dim),
            "visual_pos": torch.rand(BATCH, 5, config.visual_pos_dim),
        }
    if "pixel_values" in names:
        yield {**base, "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE)}
    if "xpath_tags_seq" in names:
        yield {
            **base,
            "xpath_tags_seq": torch.randint(0, 10, (BATCH, LENGTH, 50)),
            "xpath_subs_seq": torch.randint(0, 10, (BATCH, LENGTH, 50)),
        }


def _images(row: Row, config: Any, name: str) -> Iterator[dict[str, Tensor]]:
    parts = [config, *(getattr(config, x, None) for x in ("vision_config", "backbone_config"))]
    sizes = [getattr(x, "image_size", None) for x in parts if x is not None]
    side = next((x if isinstance(x, int) else x[0] for x in sizes if x), 64)
    channels = getattr(config, "num_channels", 3) or 3
    for size in dict.fromkeys((side, 64, 128, 224)):
        if row.task == "video_classification":
            frames = getattr(config, "num_frames", None) or 4
            yield {name: torch.randn(BATCH, frames, channels, size, size)}
        else:
            yield {name: torch.randn(BATCH, channels, size, size)}


def _audio(config: Any) -> Iterator[tuple[int, ...]]:
    parts = [config, *(getattr(config, x, None) for x in ("encoder_config", "audio_config"))]
    bins = next(
        (
            int(getattr(x, name))
            for x in parts
            for name in ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim")
            if isinstance(getattr(x, name, None), int)
        ),
        16,
    )
    long = getattr(config, "max_source_positions", 64)
    yield (BATCH, 2 * long if isinstance(long, int) else 128, bins)
    yield (BATCH, bins, 2 * long if isinstance(long, int) else 128)
    yield (BATCH, 1600)
    yield (BATCH, 1, 6400)
    yield (BATCH, 40, bins)
    yield (BATCH, getattr(config, "max_length", 64), bins)


def _masked(name: str, value: Tensor, names: set[str]) -> dict[str, Tensor]:
    made = {name: value}
    if "attention_mask" in names and value.dim() == 2:
        made["attention_mask"] = _mask(value.shape[1])
    return made


# --- rows of other packages ----------------------------------------------------------------------


def torchvision_rows() -> list[Row]:
    """Return one classification model of each of torchvision's modules."""
    declare_operators()
    import torchvision

    found: dict[str, Row] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        builder = torchvision.models.get_model_builder(name)
        name = SMALLER.get(name, name)
        found.setdefault(builder.__module__, Row("torchvision", name, "classification", name))
    return list(found.values())


SMALLER = {
    "convnext_base": "convnext_tiny",
    "regnet_x_16gf": "regnet_y_400mf",
    "resnet101": "resnet18",
    "swin_b": "swin_t",
}
"""A smaller model of the same module of torchvision, where the first by name is large."""


def declare_operators() -> None:
    """Let torchvision be imported where its compiled operators are for another build of torch.

    Classification models use none of them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []

TIMM = (
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"),
    *("convnext_atto", "convnextv2_atto", "resnet18", "efficientnet_b0", "mobilenetv3_small_050"),
    *("mixer_s32_224", "resmlp_12_224", "gmlp_s16_224", "poolformer_s12", "pvt_v2_b0"),
    *("cait_xxs24_224", "crossvit_tiny_240", "coat_tiny", "levit_128s", "mobilevit_xxs"),
    *("edgenext_xx_small", "efficientformer_l1", "fastvit_t8", "ghostnet_050", "regnety_002"),
    *("repvgg_a0", "xcit_nano_12_p16_224", "tiny_vit_5m_224", "visformer_tiny", "dla46_c"),
    *("mambaout_femto", "eva02_tiny_patch14_224", "tnt_s_patch16_224", "hrnet_w18_small"),
    *("densenet121", "maxvit_pico_rw_256", "beit_base_patch16_224", "inception_next_atto"),
)
SMALLER_TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"embed_dim": 96, "depth": 4, "num_heads": 3},
    "crossvit_tiny_240": {"img_size": 240},
}
"""Arguments of models of timm that have no small variant, or take no small images."""


def timm_rows() -> list[Row]:
    """Return small models of 36 families of timm."""
    return [Row("timm", name, "classification", name) for name in TIMM]
