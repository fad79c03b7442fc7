"""Hosts: the only package that imports vLLM, Transformers or SGLang."""
