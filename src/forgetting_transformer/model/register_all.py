"""The name under which the authors' code registers all models: `import forgetting_transformer.model.register_all`.

Importing this package's `forgetting_transformer.model` registers them already, so there is nothing more to do here.
"""
