import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Sends one request to Headrace and prints the label of its answer. */
public final class Digits {
    private static final Duration TIMEOUT = Duration.ofSeconds(10);

    public static void main(String[] arguments) throws Exception {
        String brokers = System.getenv().getOrDefault("BOOTSTRAP_SERVERS", "127.0.0.1:9092");
        String namespace = System.getenv().getOrDefault("NAMESPACE", "headrace");
        byte[] request = Files.readAllBytes(Path.of("..", "request.json"));
        Map<String, Object> settings = Map.of("bootstrap.servers", brokers);
        TopicPartition replies = new TopicPartition(namespace + ".responses", 0);
        byte[] correlationId = UUID.randomUUID().toString().getBytes(StandardCharsets.US_ASCII);

        try (KafkaConsumer<byte[], byte[]> consumer =
                        new KafkaConsumer<>(
                                settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
                KafkaProducer<byte[], byte[]> producer =
                        new KafkaProducer<>(
                                settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            consumer.assign(List.of(replies));
            consumer.seekToEnd(List.of(replies));
            consumer.position(replies); // seekToEnd is lazy: fix the position before sending

            ProducerRecord<byte[], byte[]> record =
                    new ProducerRecord<>(namespace + ".requests", request);
            record.headers()
                    .add("content-type", ascii("application/json"))
                    .add("kafka_correlationId", correlationId)
                    .add("kafka_replyTopic", ascii(replies.topic()))
                    .add("kafka_replyPartition", ByteBuffer.allocate(4).putInt(0).array())
                    .add("x-timeout-ms", ascii(Long.toString(TIMEOUT.toMillis())));
            producer.send(record).get();

            ConsumerRecord<byte[], byte[]> answer = awaitAnswer(consumer, correlationId);
            String body = new String(answer.value(), StandardCharsets.UTF_8);
            if (!Arrays.equals(answer.headers().lastHeader("x-status").value(), ascii("ok"))) {
                throw new IllegalStateException(body);
            }
            // Any JSON library reads this; a pattern keeps the example free of one.
            Matcher label = Pattern.compile("\"name\":\"label\".*?\"data\":(\\[.*?])").matcher(body);
            if (!label.find()) {
                throw new IllegalStateException("no output \"label\" in " + body);
            }
            System.out.println(label.group(1));
        }
    }

    private static ConsumerRecord<byte[], byte[]> awaitAnswer(
            KafkaConsumer<byte[], byte[]> consumer, byte[] correlationId) {
        long deadlineNs = System.nanoTime() + TIMEOUT.toNanos();
        while (System.nanoTime() < deadlineNs) {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                var header = record.headers().lastHeader("kafka_correlationId");
                if (header != null && Arrays.equals(header.value(), correlationId)) {
                    return record;
                }
            }
        }
        throw new IllegalStateException("no answer within " + TIMEOUT);
    }

    private static byte[] ascii(String text) {
        return text.getBytes(StandardCharsets.US_ASCII);
    }
}
