import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Sends orders in Avro behind the id of their schema, which it registers before. With Confluent's
 * KafkaAvroSerializer, `register` and `frame` are what the serializer does.
 */
public final class FramedOrders {
    private static final Schema SCHEMA =
            new Schema.Parser()
                    .parse(
                            "{\"type\":\"record\",\"name\":\"Order\",\"fields\":["
                                    + "{\"name\":\"id\",\"type\":\"string\"},"
                                    + "{\"name\":\"amount\",\"type\":\"double\"},"
                                    + "{\"name\":\"country\",\"type\":\"string\"},"
                                    + "{\"name\":\"ordered_at\",\"type\":"
                                    + "{\"type\":\"long\",\"logicalType\":\"timestamp-millis\"}}]}");
    private static final String[] COUNTRIES = {"DE", "FR", "PL", "US"};
    private static final long FIRST_ORDER_MS = 1_772_323_200_000L; // 2026-03-01T00:00:00Z
    private static final long HOUR_MS = 3_600_000L;

    public static void main(String[] arguments) throws Exception {
        Map<String, String> environment = System.getenv();
        String brokers = environment.getOrDefault("BOOTSTRAP_SERVERS", "127.0.0.1:9092");
        String namespace = environment.getOrDefault("NAMESPACE", "headrace");
        String registry = environment.getOrDefault("SCHEMA_REGISTRY", "http://127.0.0.1:8081");
        int count = Integer.parseInt(environment.getOrDefault("COUNT", "10"));
        int schemaId = register(registry, namespace + ".orders-value");

        Map<String, Object> settings = Map.of("bootstrap.servers", brokers, "linger.ms", 5);
        List<Future<?>> sent = new ArrayList<>();
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (int number = 0; number < count; number++) {
                String id = "order-" + number;
                ProducerRecord<byte[], byte[]> record =
                        new ProducerRecord<>(
                                namespace + ".requests", utf8(id), frame(schemaId, order(id, number)));
                record.headers()
                        .add("x-model", utf8("fraud"))
                        .add("content-type", utf8("application/avro"));
                sent.add(producer.send(record));
            }
            for (Future<?> each : sent) {
                each.get();
            }
        }
        System.out.println(count + " orders with schema " + schemaId);
    }

    private static GenericRecord order(String id, int number) {
        GenericRecord order = new GenericData.Record(SCHEMA);
        order.put("id", id);
        order.put("amount", 10.0 * (number % 50));
        order.put("country", COUNTRIES[number % COUNTRIES.length]);
        order.put("ordered_at", FIRST_ORDER_MS + number % 24 * HOUR_MS);
        return order;
    }

    private static byte[] frame(int schemaId, GenericRecord record) throws IOException {
        ByteArrayOutputStream framed = new ByteArrayOutputStream();
        DataOutputStream head = new DataOutputStream(framed);
        head.writeByte(0);
        head.writeInt(schemaId);
        BinaryEncoder encoder = EncoderFactory.get().binaryEncoder(framed, null);
        new GenericDatumWriter<GenericRecord>(SCHEMA).write(record, encoder);
        encoder.flush();
        return framed.toByteArray();
    }

    private static int register(String registry, String subject) throws Exception {
        String escaped = SCHEMA.toString().replace("\\", "\\\\").replace("\"", "\\\"");
        HttpRequest request =
                HttpRequest.newBuilder(URI.create(registry + "/subjects/" + subject + "/versions"))
                        .header("Content-Type", "application/vnd.schemaregistry.v1+json")
                        .POST(HttpRequest.BodyPublishers.ofString("{\"schema\":\"" + escaped + "\"}"))
                        .build();
        HttpResponse<String> response =
                HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
        Matcher id = Pattern.compile("\"id\"\\s*:\\s*(\\d+)").matcher(response.body());
        if (response.statusCode() != 200 || !id.find()) {
            throw new IllegalStateException(response.statusCode() + " " + response.body());
        }
        return Integer.parseInt(id.group(1));
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
