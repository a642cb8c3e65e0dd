package relay_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postrider/executor"
	"postrider/internal/devbroker"
	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/outbox"
	"postrider/relay"
)

const (
	inboundInputs  = 8192 // of a round
	inboundClients = 64
)

// BenchmarkInbound compares inputs that come over MQTT, from one sender with a window of 1024 to the commit of the last,
// with the same ones handed to executor.Submit by 64 at once, each of which waits for its answer: what the writer alone can
// do. Broker, sender and receiver are in one process. The two take turns, on one store, for runs that exist; ratio is the
// median of the rounds' ratios.
func BenchmarkInbound(b *testing.B) {
	broker, err := devbroker.Start("127.0.0.1:0", nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(broker.Close)
	n := newBenchNode(b)
	for i := range inboundClients { // the runs are made before the clock runs
		if _, err := executor.Submit(b.Context(), n.store, executor.Input{Tenant: "default", Agent: "a", Run: fmt.Sprint("in-", i), Type: "order", Source: "bench", Data: []byte("null")}); err != nil {
			b.Fatal(err)
		}
	}
	stored := make(chan int, 1024)
	receive := func(ctx context.Context, in []record.Inbound) ([]record.Outcome, error) {
		out, err := executor.Receive(ctx, n.store, in)
		if err == nil {
			stored <- len(in)
		}
		return out, err
	}
	inlets := record.Inlets{Node: nodeName, Public: []string{"a"}}
	receiver := relay.NewReceiver(n.box, &inlets, mqtt.Options{Broker: broker.URL(), ClientID: "bench-in"}, receive, relay.ReceiverOptions{})
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- relay.New(outbox.New(n.store, nodeName), record.Topics{}, func(context.Context) (relay.Conn, error) { return nil, mqtt.ErrUnreachable },
			relay.Options{Receiver: receiver}).Run(ctx)
	}()
	b.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	})
	sender, err := mqtt.Dial(b.Context(), mqtt.Options{Broker: broker.URL(), ClientID: "bench-sender"})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(sender.Close)
	topic := record.Topics{}.AgentInbox("default", "a")
	data := `"` + strings.Repeat("x", dataSize-2) + `"`
	next := 0
	event := func() []byte {
		next++
		return fmt.Appendf(nil, `{"specversion":"1.0","id":"order-%d","source":"/shop","type":"order","torun":"in-%d","data":%s}`, next, next%inboundClients, data)
	}
	for connected := false; !connected; { // what is published before reaches nobody
		sender.Publish(topic, false, event())
		select {
		case <-stored:
			connected = true
		case <-time.After(50 * time.Millisecond):
		}
	}
	overMQTT := func() time.Duration {
		payloads := make([][]byte, inboundInputs)
		for i := range payloads {
			payloads[i] = event()
		}
		runtime.GC()
		begin := time.Now()
		var window [benchWindow]mqtt.Delivery
		for i, p := range payloads {
			if d := window[i%benchWindow]; d != nil {
				<-d.Done()
			}
			window[i%benchWindow] = sender.Publish(topic, false, p)
		}
		for left := inboundInputs; left > 0; {
			select {
			case k := <-stored:
				left -= k
			case <-time.After(30 * time.Second):
				b.Fatalf("%d inputs did not come", left)
			}
		}
		return time.Since(begin)
	}
	bare := func() time.Duration {
		ids := make([]string, inboundInputs)
		for i := range ids {
			next++
			ids[i] = fmt.Sprint("order-", next)
		}
		runtime.GC()
		begin := time.Now()
		var wg sync.WaitGroup
		for c := range inboundClients {
			wg.Go(func() {
				for i := c; i < inboundInputs; i += inboundClients {
					in := executor.Input{Tenant: "default", Agent: "a", Run: fmt.Sprint("in-", c), ID: ids[i], Type: "order", Data: []byte(data), Source: "bench"}
					if _, err := executor.Submit(b.Context(), n.store, in); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		return time.Since(begin)
	}
	var ours, bares time.Duration
	var ratios []float64
	b.ReportAllocs()
	for b.Loop() { // an iteration is all rounds, whatever -benchtime says
		for range benchRounds {
			o, s := overMQTT(), bare()
			ratios = append(ratios, s.Seconds()/o.Seconds())
			ours, bares = ours+o, bares+s
		}
	}
	slices.Sort(ratios)
	count := float64(len(ratios) * inboundInputs)
	b.ReportMetric(count/ours.Seconds(), "inputs/s")
	b.ReportMetric(count/bares.Seconds(), "bare-inputs/s")
	b.ReportMetric(ratios[len(ratios)/2], "ratio")
	b.ReportMetric(0.5, "bar")
}
