"""What `--model` and `--lora` name: presets, config.json, weights in their formats, adapters and draft heads; the memory they take."""
