package relay

import (
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/internal/mqtt"
	"postrider/internal/record"
)

// A batch of the largest messages must not take all memory, and one of small ones no commit too long.
func TestBatchesAreBounded(t *testing.T) {
	for _, c := range []struct {
		name          string
		messages      int
		bytes         int // of each
		taken, ofThem int
	}{
		{"large", 40, 1 << 20, inboundBytes >> 20, 8},
		{"larger than the bound", 3, inboundBytes + 1, 1, 1},
		{"just below the bound", 3, inboundBytes - 1, 2, 2},
		{"small", 2 * inboundBatch, 1, inboundBatch, inboundBatch},
		{"few", 3, 1, 3, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := &Receiver{inlets: &record.Inlets{Node: "n1"}, log: slog.New(slog.DiscardHandler), unmatched: prometheus.NewCounter(prometheus.CounterOpts{Name: "n_total", Help: "n"})}
			line := make(chan mqtt.Message, c.messages)
			for range c.messages {
				line <- mqtt.Message{Topic: "t", Payload: make([]byte, c.bytes), Ack: func() {}}
			}
			var b arrivals
			b.add(v, <-line)
			b.fill(v, line)
			if len(b.acks) != c.taken || len(line) != c.messages-c.taken {
				t.Errorf("took %d of %d, want %d", len(b.acks), c.messages, c.taken)
			}
		})
	}
}
