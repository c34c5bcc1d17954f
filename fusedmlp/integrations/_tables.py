"""Which Hugging Face classes are replaced, and why others are not.

A name here only says what to try: the forward of each instance is read before it is replaced, so that another
version of a class, or a dropout that is on, is left as it is. The sets hold class names as the library
writes them.
"""

from __future__ import annotations

# The release of transformers whose forwards were read for these tables.
READ_IN = "5.24"

# down_proj(act(gate_proj(x)) * up_proj(x))
GATED = frozenset(
    """
    AfmoeMLP Aimv2MLP BambaMLP ChameleonMLP Cohere2MLP CohereMLP CsmMLP CwmMLP DINOv3ViTGatedMLP DeepseekV2MLP
    DeepseekV3MLP DiffLlamaMLP Dinov2SwiGLUFFN Dinov2WithRegistersSwiGLUFFN Dots1MLP Emu3MLP Ernie4_5MLP
    Ernie4_5_MoeMLP EuroBertMLP Exaone4MLP FlexOlmoMLP Gemma2MLP Gemma3MLP Gemma3nTextMLP Gemma4TextMLP
    GemmaMLP Glm4MoeMLP Glm4VisionMlp GraniteMLP GteMLP HeliumMLP HunYuanDenseV1MLP Idefics2MLP IdeficsMLP
    JambaMLP Llama4TextMLP LlamaMLP Ministral3MLP MinistralMLP MistralMLP MllamaTextMLP NomicBertMLP
    Olmo2MLP Olmo3MLP OlmoMLP OlmoeMLP PixtralMLP Qwen2MLP Qwen2MoeMLP Qwen2_5OmniMLP Qwen2_5_VLMLP Qwen3MLP
    Qwen3MoeMLP Qwen3NextMLP Qwen3VLMoeTextMLP Qwen3VLTextMLP Qwen3_5MLP RecurrentGemmaMlp SeedOssMLP
    SmolLM3MLP StableLmMLP T5Gemma2MLP T5GemmaMLP VaultGemmaMLP ZambaMLP
    """.split()
)

# fc2(act(fc1(x)))
TWO_LAYER = frozenset(
    """
    ASTMLP AltCLIPMLP BeitMLP Blip2MLP BlipMLP CLIPMLP CLIPSegMLP ChineseCLIPVisionMLP DeiTMLP Dinov2MLP
    Dinov2WithRegistersMLP EomtMLP Florence2VisionMLP FocalNetMlp GitVisionMLP GroupViTMLP HieraMlp IJepaMLP
    Idefics2VisionMLP Idefics3VisionMLP InstructBlipMLP InstructBlipVideoMLP InternVLVisionMLP JanusVisionMLP
    Kosmos2VisionMLP LwDetrViTMlp MLCDMLP MetaClip2MLP MimiMLP MgpstrMlp MllamaVisionMLP NanoChatMLP
    OneFormerTextMLP OwlViTMLP Owlv2MLP PatchTSMixerMLP PhiMLP Phi4MultimodalVisionMLP PixioMLP Sam3MLP
    Siglip2MLP SiglipMLP SmolVLMVisionMLP SwinMLP VJEPA2MLP ViTMAEMLP ViTMLP ViTMSNMLP VideoLlama3VisionMLP
    VisionMlp VitDetMlp VitPoseBackboneMLP VivitMLP XCLIPMLP
    """.split()
)

# act(dense(x)); the second Linear is in another module, behind a dropout and a residual
DENSE_ACT = frozenset(
    """
    AlignTextIntermediate AltRobertaIntermediate BertGenerationIntermediate BertIntermediate
    BigBirdIntermediate Blip2QFormerIntermediate BlipTextIntermediate BridgeTowerIntermediate
    BrosIntermediate CamembertIntermediate CanineIntermediate ChineseCLIPTextIntermediate
    ClapAudioIntermediate ClapTextIntermediate ConvBertIntermediate DPTViTIntermediate
    Data2VecTextIntermediate Data2VecVisionIntermediate DebertaIntermediate DebertaV2Intermediate
    DinatIntermediate DonutSwinIntermediate ElectraIntermediate ErnieIntermediate FNetIntermediate
    FlavaIntermediate GitIntermediate InstructBlipQFormerIntermediate InstructBlipVideoQFormerIntermediate
    LayoutLMIntermediate LayoutLMv2Intermediate LayoutLMv3Intermediate LiltIntermediate
    LongformerIntermediate LukeIntermediate LxmertIntermediate MPNetIntermediate MarkupLMIntermediate
    MaskFormerSwinIntermediate MegatronBertIntermediate MobileBertIntermediate MobileViTIntermediate
    MraIntermediate NystromformerIntermediate RemBertIntermediate RoCBertIntermediate RoFormerIntermediate
    RobertaIntermediate SEWDIntermediate SplinterIntermediate Swin2SRIntermediate Swinv2Intermediate
    TapasIntermediate TvpIntermediate VideoMAEIntermediate ViltIntermediate VisualBertIntermediate
    XLMRobertaIntermediate XLMRobertaXLIntermediate XmodIntermediate YolosIntermediate YosoIntermediate
    """.split()
)

# The same, under names that releases before 5 had.
DENSE_ACT_BEFORE_5 = frozenset(
    """
    ASTIntermediate BeitIntermediate DeiTIntermediate IJepaIntermediate SwinIntermediate ViTIntermediate
    ViTMAEIntermediate ViTMSNIntermediate VivitIntermediate
    """.split()
)

_DROPOUT_RESIDUAL = "its forward also applies a dropout and adds the residual"
_PACKED = "gate and up are packed into one Linear"
_T5 = "it has a dropout between its Linears and may keep the last one in float32"

# Classes that look like an MLP and compute something else, with what they do.
LEFT: dict[str, str] = {
    "BeamMLP": "it computes activation and product in float32",
    "BitNetMLP": "it has a norm between the product and down_proj",
    "BloomMLP": _DROPOUT_RESIDUAL,
    "CodeGenMLP": "its Linears are fc_in and fc_out, with a dropout after them",
    "DeepseekV4MLP": "it clamps gate and up",
    "FalconH1MLP": "it multiplies the gate and the output by constants",
    "FalconMLP": "its Linears are a subclass of nn.Linear",
    "GPT2MLP": "its layers are Conv1D (weights stored transposed), not nn.Linear",
    "GPTJMLP": "its Linears are fc_in and fc_out, with a dropout after them",
    "GPTNeoMLP": "its Linears are c_fc and c_proj, with a dropout after them",
    "Glm4MLP": _PACKED,
    "GlmMLP": _PACKED,
    "ModernBertMLP": _PACKED + ", the activated half first, with a dropout before the last Linear",
    "MptMLP": _DROPOUT_RESIDUAL,
    "Phi3MLP": _PACKED,
    "RobertaPreLayerNormIntermediate": "it applies a LayerNorm first",
    "T5DenseActDense": _T5,
    "T5DenseGatedActDense": _T5,
    "MT5DenseActDense": _T5,
    "MT5DenseGatedActDense": _T5,
    "UMT5DenseActDense": _T5,
    "UMT5DenseGatedActDense": _T5,
    "TimesformerIntermediate": "it applies a dropout after the activation",
}
