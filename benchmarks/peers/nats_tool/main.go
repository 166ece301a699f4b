// Command nats_tool measures a JetStream server by its own Go client, one work a run:
//
//	nats_tool -url URL -work publish|single|acked|latency -seconds S -bytes N -messages N -memory
//
// It prints figures as one line of JSON. Streams are made anew and deleted at the end.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"sort"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	stream     = "BENCH"
	subject    = "bench"
	pending    = 4000 // messages sent and not yet acknowledged, at most
	fetch      = 1000
	different  = 1000 // bodies
	patience   = 60 * time.Second
	throughput = 64 // publishers that wait for each answer, as many as our connections
)

type settings struct {
	url                       string
	work                      string
	seconds                   float64
	size, messages, perSecond int
}

func main() {
	var with settings
	flag.StringVar(&with.url, "url", nats.DefaultURL, "of the server")
	flag.StringVar(&with.work, "work", "publish", "publish, single, acked, latency")
	flag.Float64Var(&with.seconds, "seconds", 4, "of a round")
	flag.IntVar(&with.size, "bytes", 1024, "of a body")
	flag.IntVar(&with.messages, "messages", 100000, "acked: how many there are")
	flag.IntVar(&with.perSecond, "rate", 1000, "latency: messages a second")
	flag.Parse()
	if err := run(with); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(with settings) error {
	works := map[string]func(context.Context, jetstream.JetStream, settings) (map[string]float64, error){
		"publish": publish, "single": single, "acked": acked, "latency": latency,
	}
	work, known := works[with.work]
	if !known {
		return fmt.Errorf("no such work: %s", with.work)
	}
	connection, err := nats.Connect(with.url)
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience+time.Duration(2*with.seconds)*time.Second)
	defer cancel()
	js, err := jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(pending))
	if err != nil {
		return err
	}
	_ = js.DeleteStream(ctx, stream) // what an earlier run that was cut short may have left
	if _, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: stream, Subjects: []string{subject}}); err != nil {
		return err
	}
	defer js.DeleteStream(context.Background(), stream)
	found, err := work(ctx, js, with)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}

// bodies are random uppercase letters, as those of the other systems.
func bodies(size int) [][]byte {
	made := make([][]byte, different)
	for i := range made {
		made[i] = make([]byte, size)
		for j := range made[i] {
			made[i][j] = byte('A' + rand.IntN(26))
		}
	}
	return made
}

// asynchronous sends until `more` says no, and waits for all acknowledgements.
func asynchronous(js jetstream.JetStream, size int, more func(sent int) bool) (int, error) {
	source := bodies(size)
	sent := 0
	for more(sent) {
		if _, err := js.PublishAsync(subject, source[sent%different], jetstream.WithStallWait(patience)); err != nil {
			return sent, err
		}
		sent++
	}
	select {
	case <-js.PublishAsyncComplete():
		return sent, nil
	case <-time.After(patience):
		return sent, fmt.Errorf("not all of %d messages were acknowledged", sent)
	}
}

func publish(_ context.Context, js jetstream.JetStream, with settings) (map[string]float64, error) {
	begin := time.Now()
	sent, err := asynchronous(js, with.size, func(sent int) bool {
		return sent%500 != 0 || time.Since(begin).Seconds() < with.seconds
	})
	return rate(sent, begin), err
}

// single waits for each acknowledgement, in as many goroutines as our side has connections.
func single(ctx context.Context, js jetstream.JetStream, with settings) (map[string]float64, error) {
	source := bodies(with.size)
	counts := make([]int, throughput)
	errors := make([]error, throughput)
	begin := time.Now()
	var group sync.WaitGroup
	for number := range throughput {
		group.Add(1)
		go func() {
			defer group.Done()
			for time.Since(begin).Seconds() < with.seconds {
				if _, errors[number] = js.Publish(ctx, subject, source[counts[number]%different]); errors[number] != nil {
					return
				}
				counts[number]++
			}
		}()
	}
	group.Wait()
	sent := 0
	for number, count := range counts {
		if errors[number] != nil {
			return nil, errors[number]
		}
		sent += count
	}
	return rate(sent, begin), nil
}

// acked fetches 1,000 at a time and acknowledges each; the stream is filled before the clock starts.
func acked(ctx context.Context, js jetstream.JetStream, with settings) (map[string]float64, error) {
	if _, err := asynchronous(js, with.size, func(sent int) bool { return sent < with.messages }); err != nil {
		return nil, err
	}
	consumer, err := js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{
		AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 10 * fetch,
	})
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	got := 0
	for got < with.messages {
		batch, err := consumer.Fetch(fetch, jetstream.FetchMaxWait(5*time.Second))
		if err != nil {
			return nil, err
		}
		before := got
		for message := range batch.Messages() {
			if err = message.Ack(); err != nil {
				return nil, err
			}
			got++
		}
		if got == before {
			return nil, fmt.Errorf("%d of %d messages came: %v", got, with.messages, batch.Error())
		}
	}
	return rate(got, begin), nil
}

// latency counts from when a message was due to its arrival, so that a stall is not left out.
func latency(ctx context.Context, js jetstream.JetStream, with settings) (map[string]float64, error) {
	consumer, err := js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		return nil, err
	}
	total := int(with.seconds * float64(with.perSecond))
	due := make([]time.Time, total)
	took := make([]float64, 0, total)
	var lock sync.Mutex
	done := make(chan struct{})
	receiving, err := consumer.Consume(func(message jetstream.Msg) {
		number, _ := strconv.Atoi(string(message.Data()[:8]))
		lock.Lock()
		took = append(took, time.Since(due[number]).Seconds()*1000)
		all := len(took) == total
		lock.Unlock()
		_ = message.Ack()
		if all {
			close(done)
		}
	})
	if err != nil {
		return nil, err
	}
	defer receiving.Stop()
	filler := bytes.Repeat([]byte("x"), max(0, with.size-8))
	begin := time.Now()
	for number := range total {
		at := begin.Add(time.Duration(float64(number) / float64(with.perSecond) * float64(time.Second)))
		time.Sleep(time.Until(at))
		lock.Lock()
		due[number] = at
		lock.Unlock()
		if _, err = js.PublishAsync(subject, append([]byte(fmt.Sprintf("%08d", number)), filler...)); err != nil {
			return nil, err
		}
	}
	select {
	case <-done:
	case <-time.After(patience):
		return nil, fmt.Errorf("not all of %d messages came", total)
	}
	sort.Float64s(took)
	quantile := func(q float64) float64 { return took[min(total-1, int(q*float64(total)))] }
	return map[string]float64{"p50": quantile(0.5), "p99": quantile(0.99)}, nil
}

func rate(count int, begin time.Time) map[string]float64 {
	return map[string]float64{"": float64(count) / time.Since(begin).Seconds()}
}
