"""Training by push and pull: replicas train on their own and exchange fragments through servers."""
