"""Work with other libraries: Hugging Face models and safetensors files."""
