"""Subclasses of upstream's connectors, of the same name, that vLLM loads through kv_connector_module_path."""
