"""Quantized linear layers: how a checkpoint describes and stores them, the tensors that a rank holds, and what they compute.

scheme.py     how a layer is quantized, and which layers are (no torch)
hf.py         `quantization_config` of config.json, or a file beside it, as such a description (no torch)
weight.py     the one representation that all formats become at load; round-to-nearest; the forward pass
formats.py    from the tensors of each format to this representation, slice by slice
gptq.py       GPTQ (Frantar et al., arXiv:2210.17323)
"""
