import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.DecoderFactory;
import org.apache.avro.io.EncoderFactory;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.Serializer;

/**
 * Sends orders in Avro, and prints the scores with which they come back.
 *
 * <p>Without SCHEMA_REGISTRY the records are plain Avro, and their schema is the model's order.avsc.
 * With it, Apicurio's serializer registers the schema and writes its id before each record, as
 * Confluent's does, and the deserializer finds the schema of the answers in the registry.
 */
public final class ScoredOrders {
    private static final String[] COUNTRIES = {"DE", "FR", "PL", "US"};
    private static final long FIRST_ORDER_MS = 1_772_323_200_000L; // 2026-03-01T00:00:00Z
    private static final long HOUR_MS = 3_600_000L;
    private static final Duration TIMEOUT = Duration.ofSeconds(100);

    public static void main(String[] arguments) throws Exception {
        Map<String, String> environment = System.getenv();
        String namespace = environment.getOrDefault("NAMESPACE", "headrace");
        String registry = environment.get("SCHEMA_REGISTRY");
        int count = Integer.parseInt(environment.getOrDefault("COUNT", "10"));
        Schema schema = new Schema.Parser().parse(Path.of("..", "models", "fraud", "order.avsc").toFile());
        byte[] contentType = utf8(registry == null ? "avro/binary" : "application/avro");

        Map<String, Object> settings = new HashMap<>();
        settings.put(
                "bootstrap.servers", environment.getOrDefault("BOOTSTRAP_SERVERS", "127.0.0.1:9092"));
        settings.put("isolation.level", "read_committed");
        settings.put("enable.auto.commit", false);
        String keys = "org.apache.kafka.common.serialization.String";
        settings.put("key.serializer", keys + "Serializer");
        settings.put("key.deserializer", keys + "Deserializer");
        if (registry != null) {
            settings.put("apicurio.registry.url", registry);
            settings.put("apicurio.registry.auto-register", true);
            settings.put("apicurio.registry.as-confluent", true);
            settings.put("apicurio.registry.use-id", "contentId");
            settings.put("apicurio.registry.headers.enabled", false);
            settings.put("value.serializer", "io.apicurio.registry.serde.avro.AvroKafkaSerializer");
            settings.put("value.deserializer", "io.apicurio.registry.serde.avro.AvroKafkaDeserializer");
        }
        try (KafkaConsumer<String, GenericRecord> consumer =
                        registry == null
                                ? new KafkaConsumer<>(settings, null, reader(withScore(schema)))
                                : new KafkaConsumer<>(settings);
                KafkaProducer<String, GenericRecord> producer =
                        registry == null
                                ? new KafkaProducer<>(settings, null, writer(schema))
                                : new KafkaProducer<>(settings)) {
            List<TopicPartition> answers = new ArrayList<>();
            consumer.partitionsFor(namespace + ".responses")
                    .forEach(each -> answers.add(new TopicPartition(each.topic(), each.partition())));
            consumer.assign(answers);
            consumer.seekToEnd(answers);
            answers.forEach(consumer::position); // seekToEnd is lazy: fix the positions before sending

            List<Future<?>> sent = new ArrayList<>();
            for (int number = 0; number < count; number++) {
                ProducerRecord<String, GenericRecord> record =
                        new ProducerRecord<>(
                                namespace + ".requests", "order-" + number, order(schema, number));
                record.headers().add("x-model", utf8("fraud")).add("content-type", contentType);
                sent.add(producer.send(record));
            }
            for (Future<?> each : sent) {
                each.get();
            }
            printScores(consumer, count);
        }
    }

    private static void printScores(KafkaConsumer<String, GenericRecord> consumer, int count) {
        long deadlineNs = System.nanoTime() + TIMEOUT.toNanos();
        int printed = 0;
        while (printed < count) {
            if (System.nanoTime() > deadlineNs) {
                throw new IllegalStateException(printed + " of " + count + " orders in " + TIMEOUT);
            }
            for (ConsumerRecord<String, GenericRecord> answer : consumer.poll(Duration.ofMillis(200))) {
                System.out.println(answer.value().get("id") + " " + answer.value().get("score"));
                printed++;
            }
        }
    }

    private static GenericRecord order(Schema schema, int number) {
        Schema customerSchema = schema.getField("customer").schema();
        GenericRecord customer = new GenericData.Record(customerSchema);
        customer.put("age", null);
        GenericRecord order = new GenericData.Record(schema);
        order.put("id", "order-" + number);
        order.put("amount", 10.0 * (number % 50));
        order.put("customer", customer);
        order.put("country", COUNTRIES[number % COUNTRIES.length]);
        order.put("ordered_at", FIRST_ORDER_MS + number % 24 * HOUR_MS);
        return order;
    }

    /** The schema of the answers: the order's, with the model's output as the last field. */
    private static Schema withScore(Schema order) {
        List<Schema.Field> fields = new ArrayList<>();
        order.getFields().forEach(field -> fields.add(new Schema.Field(field, field.schema())));
        fields.add(new Schema.Field("score", Schema.create(Schema.Type.FLOAT), null, null));
        return Schema.createRecord(order.getName(), null, order.getNamespace(), false, fields);
    }

    private static Serializer<GenericRecord> writer(Schema schema) {
        return (topic, record) -> {
            ByteArrayOutputStream written = new ByteArrayOutputStream();
            BinaryEncoder encoder = EncoderFactory.get().binaryEncoder(written, null);
            try {
                new GenericDatumWriter<GenericRecord>(schema).write(record, encoder);
                encoder.flush();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
            return written.toByteArray();
        };
    }

    private static Deserializer<GenericRecord> reader(Schema schema) {
        return (topic, bytes) -> {
            try {
                return new GenericDatumReader<GenericRecord>(schema)
                        .read(null, DecoderFactory.get().binaryDecoder(bytes, null));
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        };
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
