package mqtt

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	paho "github.com/eclipse/paho.mqtt.golang"
)

// Subscription says what a Subscriber receives.
type Subscription struct {
	Filters []string
	// Resume: the broker's session, if it still has one, was made with exactly these filters. Then nothing is subscribed
	// again, which would make the broker send all retained messages again. Without it, Subscribe always subscribes: the
	// safe choice on the first connection of a process, whose filters may have changed since the session was made.
	// Filters that were dropped stay in the broker's session until Unsubscribe.
	Resume bool
	// Connecting is called when the network is open, before the CONNECT, and an error of it ends Subscribe; nil: nothing. A
	// broker that has no session makes an empty one of a CONNECT and says on the next connection that it has one. So Resume
	// is to be forgotten here, also by who keeps it on disk, until the Subscriber is Confirmed. Only a *RefusedError leaves
	// it as it was. An outage in which no connection comes about never gets here.
	Connecting func(ctx context.Context) error
	// Buffer is how many messages wait between network and consumer before the network is held back; default 1024.
	Buffer int
}

// Message is one message received.
type Message struct {
	Topic     string
	Payload   []byte // the consumer's to keep
	Retained  bool   // an old message, sent because of a new subscription
	Duplicate bool   // the broker has sent it before, to this session
	// Ack acknowledges. Until then the broker keeps the message and sends it again on the next connection. It does not
	// block, may be called from any goroutine and more than once; after Lost it does nothing. Acknowledge in the order of
	// arrival, after the commit.
	Ack func()
}

// Subscriber receives on one connection with a kept session: what comes while no connection is up waits in the broker
// (as far as the broker goes: many drop what is too much).
type Subscriber struct {
	*session
	c         chan Message
	full      chan struct{} // closed when the buffer has been full once
	once      sync.Once
	confirmed atomic.Bool
}

// Subscribe connects and subscribes at QoS 1, with Options.ConnectTimeout for each of the two. Errors are those of Dial, and
// *SubscribeError. Messages that the broker had kept may fill the buffer before it has confirmed the subscription:
// then Subscribe returns, and a refusal that comes later ends the connection, with Err saying so.
//
// The client id names the kept session. It must not be that of a Client.
func Subscribe(ctx context.Context, o Options, sub Subscription) (*Subscriber, error) {
	if o.ClientID == "" || len(sub.Filters) == 0 {
		return nil, errors.New("a subscriber needs a client id and a filter")
	}
	size := sub.Buffer
	if size <= 0 {
		size = 1024
	}
	s := &Subscriber{c: make(chan Message, size), full: make(chan struct{})}
	session, err := dial(ctx, o, false, sub.Connecting, s.deliver)
	if err != nil {
		return nil, err
	}
	s.session = session
	if sub.Resume && session.present {
		s.confirmed.Store(true)
		return s, nil
	}
	filters := make(map[string]byte, len(sub.Filters))
	for _, f := range sub.Filters {
		filters[f] = 1
	}
	token := session.paho.SubscribeMultiple(filters, nil).(*paho.SubscribeToken)
	granted := make(chan error, 1)
	session.conn.tasks.Go(func() {
		err := session.granted(token)
		s.confirmed.Store(err == nil)
		granted <- err
	})
	limit, cancel := context.WithTimeoutCause(ctx, o.withDefaults().ConnectTimeout, fmt.Errorf("%w: no SUBACK", ErrTimeout))
	defer cancel()
	select {
	case err = <-granted:
	case <-s.full: // what comes before the SUBACK must be consumed first
		return s, nil
	case <-limit.Done():
		err = context.Cause(limit)
	}
	if err != nil {
		s.Kill()
		return nil, fmt.Errorf("subscribe at %s: %w", session.host, err)
	}
	return s, nil
}

// Unsubscribe drops filters from the broker's session and returns after the UNSUBACK. Until then C must be consumed: the
// UNSUBACK comes behind the messages. The end of the connection or of ctx ends the wait; the filters may be dropped or not.
func (s *Subscriber) Unsubscribe(ctx context.Context, filters ...string) error {
	if len(filters) == 0 {
		return nil
	}
	token := s.paho.Unsubscribe(filters...)
	select {
	case <-token.Done():
	case <-s.lost:
		return fmt.Errorf("unsubscribe at %s: %w", s.host, s.Err())
	case <-ctx.Done():
		return fmt.Errorf("unsubscribe at %s: %w", s.host, context.Cause(ctx))
	}
	err := token.Error()
	if reason := s.Err(); err != nil && reason != nil {
		err = reason
	}
	if err != nil {
		return fmt.Errorf("unsubscribe at %s: %w", s.host, err)
	}
	return nil
}

// granted waits for the SUBACK and ends the connection if it does not grant everything.
func (s *session) granted(token *paho.SubscribeToken) error {
	select {
	case <-token.Done():
	case <-s.lost:
		return s.Err()
	}
	err := token.Error()
	if err == nil {
		for filter, code := range token.Result() {
			if code != 1 {
				err = &SubscribeError{Filter: filter, Code: code}
			}
		}
	} else {
		err = fmt.Errorf("subscribe: %w", err)
	}
	if err != nil {
		s.conn.end(err, true)
		return s.Err()
	}
	return nil
}

// C carries the messages in the order of arrival. It is never closed: select on Lost as well. Messages still in it after
// Lost may be used, but their acknowledgement comes too late, and they come again.
func (s *Subscriber) C() <-chan Message { return s.c }

// SessionPresent reports whether the broker had kept the session. If not, what was published meanwhile is lost here.
func (s *Subscriber) SessionPresent() bool { return s.present }

// Confirmed reports whether the broker's session is known to have all filters: the SUBACK has come, or Resume found them.
// Only then may the next Subscription say Resume; not after a Subscribe that failed meanwhile, see Connecting.
func (s *Subscriber) Confirmed() bool { return s.confirmed.Load() }

// deliver runs on paho's goroutine: it only sends.
func (s *Subscriber) deliver(session *session, m paho.Message) {
	msg := Message{Topic: m.Topic(), Payload: m.Payload(), Retained: m.Retained(), Duplicate: m.Duplicate(), Ack: func() {}}
	if m.Qos() == 1 {
		msg.Ack = acknowledge(session.conn, m.MessageID())
	}
	select {
	case s.c <- msg:
		return
	default:
		s.once.Do(func() { close(s.full) })
	}
	select {
	case s.c <- msg:
	case <-session.lost:
	}
}

// acknowledge writes the PUBACK itself: paho's Ack waits for two of its goroutines. Only once: the broker gives the packet
// id to another message, which a second PUBACK would acknowledge.
func acknowledge(c *conn, id uint16) func() {
	var acked atomic.Bool
	return func() {
		if acked.CompareAndSwap(false, true) {
			_, _ = c.Write([]byte{packetPuback << 4, 2, byte(id >> 8), byte(id)})
		}
	}
}
