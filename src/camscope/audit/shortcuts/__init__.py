"""What travels with a finding: regions of images, what lies in them, and what the model says when they change."""
