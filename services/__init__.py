"""The four stages that a request passes, one package each; they never import each other."""
