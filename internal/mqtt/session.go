package mqtt

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"
	"github.com/eclipse/paho.mqtt.golang/packets"
)

const (
	closeTime  = 300 * time.Millisecond // for the DISCONNECT and the broker's hanging up
	settleTime = 200 * time.Millisecond // for paho's goroutines after the socket is closed
	maxString  = 65535                  // bytes; paho cuts a longer one off and publishes on the wrong topic
)

// session is one connection and the one paho client that lives on it. The order of its end: conn ends with a reason; lost
// closes; paho notices, stops its goroutines and fails the tokens; its handler closes stopped.
type session struct {
	host    string // host:port
	paho    paho.Client
	conn    *conn
	present bool          // the broker had kept the session
	stopped chan struct{} // paho has stopped
	closing sync.Once

	mu   sync.Mutex
	err  error
	lost chan struct{}
}

// dial connects and waits for the CONNACK. deliver is paho's only handler: messages that the broker had queued come right
// after the CONNACK, before anything could be registered. connecting, if there is one, is called before the CONNECT.
func dial(ctx context.Context, o Options, clean bool, connecting func(context.Context) error, deliver func(*session, paho.Message)) (*session, error) {
	u, err := o.prepare()
	if err != nil {
		return nil, err
	}
	s, err := connect(ctx, u, o.withDefaults(), clean, connecting, deliver)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", u.Host, err)
	}
	return s, nil
}

func connect(parent context.Context, u *url.URL, o Options, clean bool, connecting func(context.Context) error,
	deliver func(*session, paho.Message)) (*session, error) {
	ctx, cancel := context.WithTimeout(parent, o.ConnectTimeout)
	defer cancel()
	// explain prefers the caller's own cause, then the time limit, to what the broken connection says of it.
	explain := func(err error) error {
		switch {
		case parent.Err() != nil:
			return context.Cause(parent)
		case ctx.Err() != nil:
			return fmt.Errorf("%w (%s)", ErrTimeout, o.ConnectTimeout)
		}
		return err
	}
	l, err := open(ctx, u, o)
	if err != nil {
		if timeout := net.Error(nil); !errors.As(err, &timeout) || !timeout.Timeout() {
			err = fmt.Errorf("%w: %w", ErrUnreachable, err)
		} else {
			err = fmt.Errorf("%w: %w", ErrTimeout, err)
		}
		return nil, explain(err)
	}
	if connecting != nil {
		if err := connecting(parent); err != nil {
			l.Close()
			return nil, err
		}
	}
	s := &session{host: u.Host, stopped: make(chan struct{}), lost: make(chan struct{})}
	s.conn = newConn(l, o, s.fail)
	s.paho = paho.NewClient(s.settings(u, o, clean, deliver))
	token := s.paho.Connect().(*paho.ConnectToken)
	select {
	case <-token.Done():
	case <-ctx.Done():
		s.conn.abort() // wakes paho out of its wait for the CONNACK
		<-token.Done()
	}
	err = token.Error()
	if code := byte(max(s.conn.connack.Load()-1, 0)); code != packets.Accepted {
		if err == nil { // paho takes a code that it does not know for success
			s.Kill()
		}
		err = &RefusedError{Code: code}
	} else if reason := s.Err(); err != nil && reason != nil {
		err = reason
	}
	switch {
	case err != nil:
		s.conn.abort()
		return nil, explain(err)
	case ctx.Err() != nil:
		s.Kill()
		return nil, explain(ErrTimeout)
	}
	s.present = token.SessionPresent()
	s.conn.startKeepAlive()
	return s, nil
}

// settings: each of these was measured; each other value loses data or hangs somewhere.
func (s *session) settings(u *url.URL, o Options, clean bool, deliver func(*session, paho.Message)) *paho.ClientOptions {
	p := paho.NewClientOptions()
	p.Servers = []*url.URL{u}
	p.SetClientID(o.ClientID).SetUsername(o.Username).SetPassword(o.Password)
	p.SetProtocolVersion(4) // else paho tries 3.1 after any failure: two timeouts, a wrong password sent twice
	p.SetCleanSession(clean)
	// With reconnects or a store, a token completes without an error although no PUBACK came. TestDeliveryNeedsPuback.
	p.SetAutoReconnect(false).SetConnectRetry(false).SetResumeSubs(false).SetStore(noStore{})
	p.SetOrderMatters(true)                   // else every message gets a goroutine, and a fifth comes out of order
	p.SetAutoAckDisabled(true)                // the consumer acknowledges, after its commit
	p.SetKeepAlive(0)                         // conn sends the pings
	p.SetWriteTimeout(o.WriteTimeout)         // bounds Publish when the connection breaks under it: 30 s without
	p.SetConnectTimeout(2 * o.ConnectTimeout) // our context comes first
	p.SetCustomOpenConnectionFn(func(*url.URL, paho.ClientOptions) (net.Conn, error) { return s.conn, nil })
	p.SetConnectionLostHandler(func(_ paho.Client, reason error) { // runs after paho has stopped and failed its tokens
		s.fail(fmt.Errorf("%w: %w", ErrProtocol, reason)) // no-op when conn knew the reason
		close(s.stopped)
	})
	p.SetDefaultPublishHandler(func(_ paho.Client, m paho.Message) { deliver(s, m) })
	if w := o.Will; w != nil {
		p.SetBinaryWill(w.Topic, w.Payload, 1, w.Retain)
	}
	return p
}

// fail sets the reason once and closes lost. It never blocks.
func (s *session) fail(reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = reason
		close(s.lost)
	}
}

// Lost is closed when the connection is gone, for whatever reason. Deliveries not yet done fail within moments of it.
func (s *session) Lost() <-chan struct{} { return s.lost }

// Err says why, after Lost; nil before. It wraps ErrPeerClosed, ErrTimeout or ErrClosed, or none of them when the network
// failed or the stream was not MQTT.
func (s *session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close sends what was published or acknowledged and a DISCONNECT, which withholds the will, and waits for the broker to
// hang up: 500 ms at most. It does not wait for PUBACKs. Closing again, or after Lost, is fine.
func (s *session) Close() {
	s.closing.Do(func() {
		s.fail(ErrClosed)
		ctx, cancel := context.WithTimeout(context.Background(), closeTime)
		defer cancel()
		s.conn.shutdown(ctx)
	})
	s.settle()
}

// Kill cuts the connection at once; what is not sent yet never will be. The broker publishes the will.
func (s *session) Kill() {
	s.fail(ErrClosed)
	s.conn.abort()
	s.settle()
}

// settle waits until paho has no goroutine left. The time limit only guards against a paho that does not stop.
func (s *session) settle() {
	limit := time.NewTimer(settleTime)
	defer limit.Stop()
	select {
	case <-s.stopped:
	case <-limit.C:
	}
}

// noStore keeps nothing, so that paho never sends anything again behind our back.
type noStore struct{}

func (noStore) Open()                             {}
func (noStore) Put(string, packets.ControlPacket) {}
func (noStore) Get(string) packets.ControlPacket  { return nil }
func (noStore) All() []string                     { return nil }
func (noStore) Del(string)                        {}
func (noStore) Close()                            {}
func (noStore) Reset()                            {}
