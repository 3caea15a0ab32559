"""What is measured or done during training, besides training itself: a small file each."""
