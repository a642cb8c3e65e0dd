// Package mqtttest has the faults that an MQTT client must survive, for tests: a Proxy that spoils the connection to any
// broker, a scripted Fake broker, and a Silent one. Each belongs to a test and is gone, with all its goroutines, when
// the test ends; each may be changed while connections are open.
package mqtttest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is how long Await and Eventually wait before they fail the test.
const patience = 20 * time.Second

// Packet types.
const (
	Connect     = 1
	Connack     = 2
	Publish     = 3
	Puback      = 4
	Subscribe   = 8
	Suback      = 9
	Unsubscribe = 10
	Unsuback    = 11
	Pingreq     = 12
	Pingresp    = 13
	Disconnect  = 14
)

// Packet is one MQTT 3.1.1 packet.
type Packet struct {
	Type  byte
	Flags byte
	Raw   []byte // all of it, as it came
	body  []byte
}

// ReadPacket reads the next packet.
func ReadPacket(r *bufio.Reader) (Packet, error) {
	first, err := r.ReadByte()
	if err != nil {
		return Packet{}, err
	}
	raw, length := []byte{first}, 0
	for shift := 0; ; shift += 7 {
		b, err := r.ReadByte()
		if err != nil {
			return Packet{}, err
		}
		raw = append(raw, b)
		length |= int(b&0x7f) << shift
		if b&0x80 == 0 {
			break
		}
		if shift == 21 {
			return Packet{}, fmt.Errorf("mqtttest: packet length of more than 4 bytes")
		}
	}
	head := len(raw)
	raw = append(raw, make([]byte, length)...)
	if _, err := io.ReadFull(r, raw[head:]); err != nil {
		return Packet{}, err
	}
	return Packet{Type: first >> 4, Flags: first & 15, Raw: raw, body: raw[head:]}, nil
}

// Dup, QoS and Retain are the flags of a PUBLISH.
func (p Packet) Dup() bool    { return p.Flags&8 != 0 }
func (p Packet) QoS() byte    { return p.Flags >> 1 & 3 }
func (p Packet) Retain() bool { return p.Flags&1 != 0 }

// Topic and Payload are those of a PUBLISH.
func (p Packet) Topic() string {
	topic, _, _ := p.publish()
	return topic
}

func (p Packet) Payload() []byte {
	_, _, payload := p.publish()
	return payload
}

// ID is the packet id; 0 where there is none.
func (p Packet) ID() uint16 {
	switch {
	case p.Type == Publish:
		_, id, _ := p.publish()
		return id
	case p.Type >= Puback && p.Type <= Unsuback && len(p.body) >= 2:
		return uint16(p.body[0])<<8 | uint16(p.body[1])
	}
	return 0
}

func (p Packet) publish() (topic string, id uint16, payload []byte) {
	if p.Type != Publish || len(p.body) < 2 {
		return "", 0, nil
	}
	n := 2 + int(p.body[0])<<8 + int(p.body[1])
	if len(p.body) < n {
		return "", 0, nil
	}
	topic, payload = string(p.body[2:n]), p.body[n:]
	if p.QoS() > 0 && len(payload) >= 2 {
		id, payload = uint16(payload[0])<<8|uint16(payload[1]), payload[2:]
	}
	return topic, id, payload
}

// Eventually polls until ok, and fails the test when that takes too long. Where something can be waited for, wait for it.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %s still not: %s", patience, what)
		}
	}
}

// server accepts connections on 127.0.0.1 and waits for all it has started.
type server struct {
	t     testing.TB
	serve func(*peer)

	mu     sync.Mutex
	change *sync.Cond
	addr   string
	l      net.Listener // nil: refuses
	peers  map[*peer]struct{}
	ended  bool
	tasks  sync.WaitGroup
}

// peer is one accepted connection. Its goroutines end when done closes.
type peer struct {
	net.Conn
	done chan struct{}
	once sync.Once
}

func (p *peer) end() {
	p.once.Do(func() {
		close(p.done)
		p.Conn.Close()
	})
}

func (s *server) start(t testing.TB, serve func(*peer)) {
	s.t, s.serve, s.peers, s.addr = t, serve, map[*peer]struct{}{}, "127.0.0.1:0"
	s.change = sync.NewCond(&s.mu)
	if err := s.listen(); err != nil {
		t.Fatalf("mqtttest: %v", err)
	}
	t.Cleanup(func() {
		s.set(func() { s.ended = true })
		s.Refuse(true)
		s.Cut()
		s.tasks.Wait()
	})
}

// set changes what mu guards and wakes everybody who waits for it.
func (s *server) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.change.Broadcast()
}

func (s *server) listen() error {
	l, err := (&net.ListenConfig{Control: small}).Listen(context.Background(), "tcp", s.addr)
	if err != nil {
		return err
	}
	s.l, s.addr = l, l.Addr().String()
	s.tasks.Go(func() { s.accept(l) })
	return nil
}

// small makes the kernel hold little, in segments as networks have them, not of the 64 KiB of a loopback: else a Stall and
// a Throttle are noticed late, or move in jumps.
func small(_, _ string, c syscall.RawConn) error {
	var size, segment error
	err := c.Control(func(fd uintptr) {
		size = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 32<<10)
		segment = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG, 1400)
	})
	return errors.Join(err, size, segment)
}

func (s *server) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		p := &peer{Conn: c, done: make(chan struct{})}
		s.mu.Lock()
		if s.l != l { // refusing since a moment
			s.mu.Unlock()
			c.Close()
			return
		}
		s.peers[p] = struct{}{}
		s.mu.Unlock()
		s.tasks.Go(func() {
			s.serve(p)
			p.end()
			s.set(func() { delete(s.peers, p) })
		})
	}
}

// Addr is host:port.
func (s *server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// URL is the address as clients take it.
func (s *server) URL() string { return "tcp://" + s.Addr() }

// Refuse closes the port (connection refused) or opens it again. Open connections stay.
func (s *server) Refuse(refuse bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case refuse && s.l != nil:
		s.l.Close()
		s.l = nil
	case !refuse && s.l == nil && !s.ended:
		if err := s.listen(); err != nil {
			s.t.Errorf("mqtttest: open %s again: %v", s.addr, err)
		}
	}
}

// Cut cuts all connections now.
func (s *server) Cut() {
	s.set(func() {
		for p := range s.peers {
			p.end()
		}
	})
}

// await waits for a condition over what mu guards.
func (s *server) await(what string, ok func() bool) {
	s.t.Helper()
	late := false
	timer := time.AfterFunc(patience, func() { s.set(func() { late = true }) })
	defer timer.Stop()
	s.mu.Lock()
	for !ok() && !late {
		s.change.Wait()
	}
	failed := !ok()
	s.mu.Unlock()
	if failed {
		s.t.Fatalf("after %s still not: %s", patience, what)
	}
}

// Silent is a broker that accepts connections and never says a word. It returns its host:port.
func Silent(t testing.TB) string {
	var s server
	s.start(t, func(p *peer) { _, _ = io.Copy(io.Discard, p) })
	return s.Addr()
}
