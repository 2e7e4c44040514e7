"""Small backbones that are not ours, in which a depth mixer of ours runs as its authors' code did."""
