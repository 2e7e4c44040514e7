"""What a model costs, counted: modules are traced on the meta device, where tensors have shapes and no memory."""
