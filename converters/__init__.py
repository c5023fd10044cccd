"""One table a family: which dimension of which tensor lies along which axis."""
