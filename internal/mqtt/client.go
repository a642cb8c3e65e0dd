package mqtt

import (
	"context"
	"fmt"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"
)

// Client publishes on one connection with a clean session. Its methods may be called from any goroutine.
type Client struct{ *session }

// Dial connects and waits for the CONNACK, at most Options.ConnectTimeout; ctx ends the wait earlier. The errors wrap
// ErrUnreachable, ErrTimeout, ErrPeerClosed or a *RefusedError, or are the cause of ctx.
func Dial(ctx context.Context, o Options) (*Client, error) {
	s, err := dial(ctx, o, true, nil, func(*session, paho.Message) {})
	if err != nil {
		return nil, err
	}
	return &Client{s}, nil
}

// Delivery is one message under way.
type Delivery interface {
	// Done is closed when the message was acknowledged or never will be.
	Done() <-chan struct{}
	// Error is nil only after the PUBACK on the connection that sent the message, ErrInFlight before Done. Otherwise it
	// wraps ErrNoPacketID, or what Client.Err says; whether the broker has the message is then unknown.
	Error() error
}

// Publish sends a message at QoS 1 and does not wait for its PUBACK. It waits while 256 KiB are not yet written to the
// network, and never longer than the connection lasts, plus WriteTimeout when it breaks in the middle of the call.
//
// The payload is not copied: it belongs to the connection until the Delivery is done. How many messages are in flight is
// the caller's to limit; the 65,536th fails with ErrNoPacketID. Topics are not checked but for their length.
func (c *Client) Publish(topic string, retain bool, payload []byte) Delivery {
	if topic == "" || len(topic) > maxString {
		return failed{fmt.Errorf("publish: a topic has 1 to %d bytes, not %d", maxString, len(topic))}
	}
	if len(topic)+len(payload) > maxPacket {
		return failed{fmt.Errorf("publish: %d bytes are more than a packet holds", len(payload))}
	}
	if err := c.conn.admit(); err != nil {
		if reason := c.Err(); reason != nil {
			err = reason
		}
		return failed{fmt.Errorf("publish: %w", err)}
	}
	d := &delivery{c.session, c.paho.Publish(topic, 1, retain, payload)}
	if err := d.token.Error(); err != nil {
		c.conn.withdraw()
	}
	return d
}

const maxPacket = 268_435_455 - 4 // the largest remaining length, less topic length and packet id

type delivery struct {
	s     *session
	token paho.Token
}

func (d *delivery) Done() <-chan struct{} { return d.token.Done() }

func (d *delivery) Error() error {
	select {
	case <-d.token.Done():
	default:
		return ErrInFlight
	}
	err := d.token.Error()
	switch {
	case err == nil:
		return nil
	case err.Error() == "no message IDs available": // paho has no value for it. TestTooManyInFlight.
		return fmt.Errorf("publish: %w", ErrNoPacketID)
	}
	// Tokens fail before paho tells why, if it was paho who gave up.
	reason := time.NewTimer(settleTime)
	defer reason.Stop()
	select {
	case <-d.s.lost:
		return fmt.Errorf("publish: %w", d.s.Err())
	case <-reason.C:
		return fmt.Errorf("publish: %w: %w", ErrTimeout, err)
	}
}

type failed struct{ err error }

func (f failed) Error() error        { return f.err }
func (failed) Done() <-chan struct{} { return closed }

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()
