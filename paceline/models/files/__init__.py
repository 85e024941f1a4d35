"""Files of models: safetensors, tensor names and views, downloads."""
