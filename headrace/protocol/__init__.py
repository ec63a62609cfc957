"""Records on the topics: headers, messages, tensors, codecs and schemas."""
