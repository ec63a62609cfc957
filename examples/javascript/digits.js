// Send one request to Headrace and print the label of its answer.
const { randomUUID } = require("node:crypto");
const { readFileSync } = require("node:fs");
const { join } = require("node:path");
const { Kafka, logLevel } = require("kafkajs");

const brokers = (process.env.BOOTSTRAP_SERVERS ?? "127.0.0.1:9092").split(",");
const namespace = process.env.NAMESPACE ?? "headrace";
const replyTopic = `${namespace}.responses`;
const replyPartition = 0;
const timeoutMs = 10_000;

async function main() {
  const kafka = new Kafka({ clientId: "headrace-example", brokers, logLevel: logLevel.ERROR });
  const correlationId = randomUUID();
  // kafkajs reads in groups only; a group of its own sees every answer. It asks for records for a
  // short time each, because the request is sent after the first time.
  const groupId = `headrace-example-${correlationId}`;
  const consumer = kafka.consumer({ groupId, maxWaitTimeInMs: 100 });
  const producer = kafka.producer();
  await Promise.all([consumer.connect(), producer.connect()]);
  await consumer.subscribe({ topics: [replyTopic] });

  // FETCH_START would be too early: kafkajs looks up where the topic ends after it.
  const reading = new Promise((resolve) => consumer.on(consumer.events.FETCH, resolve));
  let timer;
  const answer = new Promise((resolve, reject) => {
    timer = setTimeout(() => reject(new Error(`no answer within ${timeoutMs} ms`)), timeoutMs * 3);
    consumer
      .run({
        eachMessage: async ({ message }) => {
          if (message.headers.kafka_correlationId?.toString() === correlationId) resolve(message);
        },
      })
      .catch(reject);
  });

  try {
    // Sent before the group reads, the answer could stand before the consumer's first position.
    await reading;
    const partition = Buffer.alloc(4);
    partition.writeInt32BE(replyPartition);
    await producer.send({
      topic: `${namespace}.requests`,
      messages: [
        {
          value: readFileSync(join(__dirname, "..", "request.json")),
          headers: {
            "content-type": "application/json",
            kafka_correlationId: correlationId,
            kafka_replyTopic: replyTopic,
            kafka_replyPartition: partition,
            "x-timeout-ms": String(timeoutMs),
          },
        },
      ],
    });
    const { headers, value } = await answer;
    const body = JSON.parse(value.toString());
    if (headers["x-status"].toString() !== "ok") throw new Error(body.error);
    console.log(body.outputs.find((output) => output.name === "label").data);
  } finally {
    clearTimeout(timer);
    await Promise.all([consumer.disconnect(), producer.disconnect()]);
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
