"""Taking Notes on the Fly (Wu et al., 2021):
note embeddings of rare words, from corpus to model and study."""
