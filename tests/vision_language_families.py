"""Tiny vision-language models of transformers with random weights, one for each family, with their own processors."""

import numpy as np
import torch

WORDS = [
    "what",
    "is",
    "this",
    "a",
    "cat",
    "dog",
    "on",
    "mat",
    "the",
    ".",
    "object",
    "square",
    "disk",
    "cross",
    "triangle",
]
IMAGE = "<image>"
MARKERS = [
    IMAGE, "<video>", "<vision_start>", "<vision_end>", "<boi>", "<eoi>", "<global-img>", "<fake_token_around_image>",
    "<end_of_utterance>", "<audio>", "<boa>", "<eoa>", *(f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)),
]  # fmt: skip
PAD, BOS, EOS, UNKNOWN = range(4)
VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", *MARKERS, *WORDS]
IMAGE_ID, VIDEO_ID, START_ID, END_ID, BOI_ID, EOI_ID = range(4, 10)
IMAGE_SIZE = (48, 80)
CLIP_NORM = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.25]}


def build_tokenizer(image_token=IMAGE):
    """A tokenizer with one token for each word, and one for each marker."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=MARKERS,
        extra_special_tokens={
            "image_token": image_token,
            "video_token": "<video>",
            "audio_token": "<audio>",
            "boa_token": "<boa>",
            "eoa_token": "<eoa>",
            "vision_start_token": "<vision_start>",
            "vision_end_token": "<vision_end>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "start_image_token": "<boi>",
            "end_image_token": "<eoi>",
            "context_image_token": IMAGE,
            "fake_image_token": "<fake_token_around_image>",
            "image_boundary_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )


def text_settings(**settings):
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(VOCABULARY),
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **settings,
    }


def vision_settings(size=32, patch=8, **settings):
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": size,
        "patch_size": patch,
        **settings,
    }


def clip_tower(**settings):
    return {"model_type": "clip_vision_model", "projection_dim": 16, **vision_settings(**settings)}


def siglip_tower(**settings):
    return {"model_type": "siglip_vision_model", "vision_use_head": False, **vision_settings(**settings)}


def llama(**settings):
    return {"model_type": "llama", **text_settings(**settings)}


def llava():
    import transformers as t

    config = t.LlavaConfig(vision_config=clip_tower(), text_config=llama(), image_token_id=IMAGE_ID)
    images = t.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return t.LlavaForConditionalGeneration(config), t.LlavaProcessor(images, build_tokenizer(), **options)


def paligemma():
    import transformers as t

    text = {"model_type": "gemma", "head_dim": 8, **text_settings()}
    config = t.PaliGemmaConfig(
        vision_config=siglip_tower(), text_config=text, image_token_id=IMAGE_ID, projection_dim=32, hidden_size=32
    )
    images = t.SiglipImageProcessor(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    model = t.PaliGemmaForConditionalGeneration(config)
    processor = t.PaliGemmaProcessor(images, build_tokenizer())
    model.resize_token_embeddings(len(processor.tokenizer))
    return model, processor


def qwen_text(**settings):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return text_settings(rope_parameters=rope, rope_scaling=rope, **settings)


def qwen_ids():
    return {
        "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
        "vision_start_token_id": START_ID,
        "vision_end_token_id": END_ID,
    }


def qwen_processor(kind, patch):
    import transformers as t

    images = t.Qwen2VLImageProcessor(
        patch_size=patch,
        merge_size=2,
        size={"shortest_edge": 16 * patch**2, "longest_edge": 100 * patch**2},
        **CLIP_NORM,
    )
    return kind(images, build_tokenizer(), t.Qwen2VLVideoProcessor())


def qwen2_vl():
    import transformers as t

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    config = t.Qwen2VLConfig(text_config=qwen_text(), vision_config=vision, **qwen_ids())
    return t.Qwen2VLForConditionalGeneration(config), qwen_processor(t.Qwen2VLProcessor, 8)


def qwen2_5_vl():
    import transformers as t

    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 8, "intermediate_size": 48,
        "window_size": 32, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = t.Qwen2_5_VLConfig(text_config=qwen_text(), vision_config=vision, **qwen_ids())
    return t.Qwen2_5_VLForConditionalGeneration(config), qwen_processor(t.Qwen2_5_VLProcessor, 8)


def qwen3_vl():
    import transformers as t

    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 8, "intermediate_size": 48,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = t.Qwen3VLConfig(text_config=qwen_text(head_dim=8), vision_config=vision, **qwen_ids())
    return t.Qwen3VLForConditionalGeneration(config), qwen_processor(t.Qwen3VLProcessor, 8)


def qwen3_5():
    import transformers as t

    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 8, "intermediate_size": 48,
        "num_position_embeddings": 64,
    }  # fmt: skip
    text = qwen_text(
        head_dim=8, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    config = t.Qwen3_5Config(text_config=text, vision_config=vision, **qwen_ids())
    return t.Qwen3_5ForConditionalGeneration(config), qwen_processor(t.Qwen3VLProcessor, 8)


PINPOINTS = [[32, 64], [64, 32], [64, 64], [32, 96]]


def llava_next():
    import transformers as t

    config = t.LlavaNextConfig(
        vision_config=clip_tower(), text_config=llama(), image_token_id=IMAGE_ID, image_grid_pinpoints=PINPOINTS
    )
    images = t.LlavaNextImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS
    )
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return t.LlavaNextForConditionalGeneration(config), t.LlavaNextProcessor(images, build_tokenizer(), **options)


def llava_onevision():
    import transformers as t

    config = t.LlavaOnevisionConfig(
        vision_config=siglip_tower(),
        text_config={"model_type": "qwen2", **text_settings()},
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_1",
    )
    images = t.LlavaOnevisionImageProcessor(size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS)
    processor = t.LlavaOnevisionProcessor(
        images,
        build_tokenizer(),
        t.LlavaOnevisionVideoProcessor(),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_1",
    )
    return t.LlavaOnevisionForConditionalGeneration(config), processor


def gemma3():
    import transformers as t

    text = {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 512, **text_settings()}
    config = t.Gemma3Config(
        vision_config=siglip_tower(size=64), text_config=text, image_token_id=IMAGE_ID, boi_token_id=BOI_ID,
        eoi_token_id=EOI_ID, mm_tokens_per_image=16,
    )  # fmt: skip
    images = t.Gemma3ImageProcessor(size={"height": 64, "width": 64})
    return t.Gemma3ForConditionalGeneration(config), t.Gemma3Processor(images, build_tokenizer(), image_seq_length=16)


def gemma4():
    import transformers as t

    text = {
        "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 8, "sliding_window": 512, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": len(VOCABULARY), **text_settings(),
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2,
    }  # fmt: skip
    config = t.Gemma4Config(
        vision_config=vision, text_config=text, audio_config=None, image_token_id=IMAGE_ID, boi_token_id=BOI_ID,
        eoi_token_id=EOI_ID, video_token_id=VIDEO_ID,
    )  # fmt: skip
    images = t.Gemma4ImageProcessor(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)
    processor = t.Gemma4Processor(t.Gemma4AudioFeatureExtractor(), images, build_tokenizer(), t.Gemma4VideoProcessor())
    return t.Gemma4ForConditionalGeneration(config), processor


def idefics_config(kind, model_type):
    vision = {"model_type": model_type, **vision_settings(size=32, patch=4)}
    return kind(vision_config=vision, text_config=llama(), image_token_id=IMAGE_ID, scale_factor=2, pad_token_id=PAD)


def idefics3():
    import transformers as t

    config = idefics_config(t.Idefics3Config, "idefics3_vision")
    images = t.Idefics3ImageProcessor(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    return t.Idefics3ForConditionalGeneration(config), t.Idefics3Processor(images, build_tokenizer(), image_seq_len=16)


def smolvlm():
    import transformers as t

    config = idefics_config(t.SmolVLMConfig, "smolvlm_vision")
    images = t.SmolVLMImageProcessor(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    processor = t.Idefics3Processor(images, build_tokenizer(), image_seq_len=16)  # its own needs a package for numbers
    return t.SmolVLMForConditionalGeneration(config), processor


def idefics2():
    import transformers as t

    config = t.Idefics2Config(
        vision_config={"model_type": "idefics2_vision", **vision_settings(size=64)},
        text_config={"model_type": "mistral", **text_settings()},
        perceiver_config={
            "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
            "resampler_head_dim": 8, "num_key_value_heads": 2,
        },
        image_token_id=IMAGE_ID,
    )  # fmt: skip
    images = t.Idefics2ImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}, do_image_splitting=False)
    processor = t.Idefics2Processor(images, build_tokenizer(), image_seq_len=4)
    model = t.Idefics2ForConditionalGeneration(config)
    model.resize_token_embeddings(len(processor.tokenizer))
    return model, processor


def internvl():
    import transformers as t

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": [32, 32],
        "patch_size": [4, 4],
    }  # fmt: skip
    config = t.InternVLConfig(
        vision_config=vision, text_config={"model_type": "qwen2", **text_settings()}, image_token_id=IMAGE_ID,
        image_seq_length=16,
    )  # fmt: skip
    images = t.GotOcr2ImageProcessor(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6, **CLIP_NORM
    )
    processor = t.InternVLProcessor(images, build_tokenizer(), t.InternVLVideoProcessor(), image_seq_length=16)
    return t.InternVLForConditionalGeneration(config), processor


def blip_2():
    import transformers as t

    config = t.Blip2Config(
        vision_config=vision_settings(),
        qformer_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "encoder_hidden_size": 32, "vocab_size": len(VOCABULARY),
        },
        text_config={
            "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 32, "vocab_size": len(VOCABULARY), "pad_token_id": PAD,
        },
        num_query_tokens=4,
        image_token_index=IMAGE_ID,
        image_token_id=IMAGE_ID,
    )  # fmt: skip
    from tokenizers import AddedToken

    images, tokenizer = t.BlipImageProcessor(size={"height": 32, "width": 32}), build_tokenizer()
    processor = t.Blip2Processor(images, tokenizer, num_query_tokens=4)
    processor.image_token = AddedToken(IMAGE, normalized=False, special=True)
    return t.Blip2ForConditionalGeneration(config), processor


def florence2():
    import transformers as t

    vision = {
        "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
        "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4], "window_size": 4,
        "projection_dim": 32,
    }  # fmt: skip
    text = {
        "model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": len(VOCABULARY),
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": EOS,
    }  # fmt: skip
    config = t.Florence2Config(vision_config=vision, text_config=text, image_token_id=IMAGE_ID)
    images = t.CLIPImageProcessor(size={"height": 32, "width": 32}, do_center_crop=False)
    images.image_seq_length = 17
    return t.Florence2ForConditionalGeneration(config), t.Florence2Processor(images, build_tokenizer())


FAMILIES = {
    function.__name__: function
    for function in (
        llava, paligemma, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_5, llava_next, llava_onevision, gemma3, gemma4, idefics3,
        smolvlm, internvl, idefics2, blip_2, florence2,
    )
}  # fmt: skip
MARKER_IN_PROMPT = {"gemma3": "<boi>", "blip_2": "", "florence2": ""}  # otherwise IMAGE
ADDS_IMAGE = ("blip_2", "florence2")


def build(family, seed=0):
    """A model with random weights in eval mode, and its processor."""
    torch.manual_seed(seed)
    model, processor = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():  # some are zero at the start
            if parameter.ndim > 1 or not bool(parameter.any()):
                parameter.normal_(0, 0.2)
    return model.eval(), processor


def write_prompt(family, text="what {} is this"):
    marker = MARKER_IN_PROMPT.get(family, IMAGE)
    return " ".join(text.format(marker).split())


def draw_noise(size=IMAGE_SIZE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
