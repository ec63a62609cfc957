// Command digits sends one request to Headrace and prints the label of its answer.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const timeout = 10 * time.Second

// answer has the fields of a response and of an error that this program reads.
type answer struct {
	Error   string `json:"error"`
	Outputs []struct {
		Name string          `json:"name"`
		Data json.RawMessage `json:"data"`
	} `json:"outputs"`
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	label, err := infer(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(label)
}

func infer(ctx context.Context) ([]int64, error) {
	namespace := env("NAMESPACE", "headrace")
	replyTopic := namespace + ".responses"
	request, err := os.ReadFile("../request.json")
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(env("BOOTSTRAP_SERVERS", "127.0.0.1:9092"), ",")...),
		// From a moment before the request on: AtEnd would be found out only when the client polls.
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{
			replyTopic: {0: kgo.NewOffset().AfterMilli(time.Now().Add(-time.Second).UnixMilli())},
		}),
	)
	if err != nil {
		return nil, err
	}
	defer client.Close()

	correlationID := []byte(strconv.FormatInt(time.Now().UnixNano(), 36))
	record := &kgo.Record{
		Topic: namespace + ".requests",
		Value: request,
		Headers: []kgo.RecordHeader{
			{Key: "content-type", Value: []byte("application/json")},
			{Key: "kafka_correlationId", Value: correlationID},
			{Key: "kafka_replyTopic", Value: []byte(replyTopic)},
			{Key: "kafka_replyPartition", Value: binary.BigEndian.AppendUint32(nil, 0)},
			{Key: "x-timeout-ms", Value: []byte(strconv.FormatInt(timeout.Milliseconds(), 10))},
		},
	}
	if err := client.ProduceSync(ctx, record).FirstErr(); err != nil {
		return nil, err
	}
	reply, err := receive(ctx, client, correlationID)
	if err != nil {
		return nil, err
	}
	var body answer
	if err := json.Unmarshal(reply.Value, &body); err != nil {
		return nil, err
	}
	if body.Error != "" {
		return nil, errors.New(body.Error)
	}
	for _, output := range body.Outputs {
		if output.Name == "label" {
			var label []int64
			err := json.Unmarshal(output.Data, &label)
			return label, err
		}
	}
	return nil, errors.New("no output label in the answer")
}

// receive returns the record that answers the request with this correlation id.
func receive(ctx context.Context, client *kgo.Client, correlationID []byte) (*kgo.Record, error) {
	for {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err0(); err != nil {
			return nil, err
		}
		for _, record := range fetches.Records() {
			for _, header := range record.Headers {
				if header.Key == "kafka_correlationId" && bytes.Equal(header.Value, correlationID) {
					return record, nil
				}
			}
		}
	}
}

func env(name, fallback string) string {
	if value, found := os.LookupEnv(name); found {
		return value
	}
	return fallback
}
