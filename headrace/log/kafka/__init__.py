"""The log on Kafka, by aiokafka."""
