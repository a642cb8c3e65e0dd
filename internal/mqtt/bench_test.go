package mqtt_test

import (
	"testing"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"

	"postrider/internal/mqtt"
)

// Ours against stock paho, on the same broker, by turns: only the ratio says something about the code.
func BenchmarkPublishWindow1024(b *testing.B) {
	const window, round = 1024, 20_000
	broker := startBroker(b)
	c := dial(b, mqtt.Options{Broker: broker.URL()})
	stock := paho.NewClient(paho.NewClientOptions().AddBroker(broker.URL()).SetClientID("stock"))
	if t := stock.Connect(); t.Wait() && t.Error() != nil {
		b.Fatal(t.Error())
	}
	defer stock.Disconnect(100)
	payload := make([]byte, 300)
	type pending interface {
		Done() <-chan struct{}
		Error() error
	}
	run := func(publish func() pending) time.Duration {
		began := time.Now()
		flight := make(chan pending, window)
		failed := make(chan error, 1)
		go func() {
			defer close(failed)
			for p := range flight {
				<-p.Done()
				if err := p.Error(); err != nil {
					failed <- err
					return
				}
			}
		}()
		for range round {
			select {
			case flight <- publish():
			case err := <-failed:
				b.Fatal(err)
			}
		}
		close(flight)
		if err := <-failed; err != nil {
			b.Fatal(err)
		}
		return time.Since(began)
	}
	ours := func() pending { return c.Publish("bench/topic/of/a/run", false, payload) }
	theirs := func() pending { return stock.Publish("bench/topic/of/a/run", 1, false, payload) }
	run(ours)
	run(theirs)
	var a, s time.Duration
	b.ReportAllocs()
	for b.Loop() {
		a += run(ours)
		s += run(theirs)
	}
	n := float64(b.N * round)
	b.ReportMetric(n/a.Seconds(), "tuned-msg/s")
	b.ReportMetric(n/s.Seconds(), "stock-msg/s")
	b.ReportMetric(s.Seconds()/a.Seconds(), "ratio")
}
