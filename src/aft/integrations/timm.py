"""AFT for timm. Importing this module registers the paper's image models, without weights::

import timm, aft.integrations.timm

timm.list_models("aft_*")
model = timm.create_model("aft_conv_tiny_k11_h192_patch16_224", num_classes=10)

# AFT in a ViT of timm's own:
conv = aft.integrations.timm.aft_attention("conv", grid_size=(14, 14), kernel_size=11)
timm.create_model("vit_tiny_patch16_224", attn_layer=conv, class_token=False, global_pool="avg")
"""

from aft.integrations.timm_attention import AFTAttention, aft_attention
from aft.integrations.timm_models import AFTVisionTransformer

__all__ = ["AFTAttention", "AFTVisionTransformer", "aft_attention"]
