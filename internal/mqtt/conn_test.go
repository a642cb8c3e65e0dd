package mqtt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"
	"github.com/gorilla/websocket"
)

// pipe is a conn and its other end, over TCP.
func pipe(t testing.TB, o Options) (*conn, *net.TCPConn, <-chan error) {
	t.Helper()
	// Segments as networks have them: those of a loopback, 64 KiB, make a small window open in jumps.
	segments := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG, 1400) })
	}}
	l, err := segments.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	link, err := open(context.Background(), &url.URL{Scheme: "tcp", Host: l.Addr().String()}, o.withDefaults())
	if err != nil {
		t.Fatal(err)
	}
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	c := newConn(link, o.withDefaults(), func(err error) { failed <- err })
	t.Cleanup(func() { c.abort(); peer.Close() })
	return c, peer.(*net.TCPConn), failed
}

func TestWriteNeverBlocksAndAdmitDoes(t *testing.T) {
	c, peer, _ := pipe(t, Options{WriteTimeout: time.Minute})
	packet := append([]byte{packetPublish << 4, 0x80, 0x80, 0x40}, make([]byte, 1<<20)...)
	for range 20 { // far more than the kernel takes
		if _, err := c.Write(packet); err != nil {
			t.Fatal(err)
		}
	}
	admitted := make(chan error, 1)
	go func() { admitted <- c.admit() }()
	select {
	case <-admitted:
		t.Fatal("room on a full link")
	case <-time.After(50 * time.Millisecond):
	}
	read := make(chan int)
	go func() {
		n, b := 0, make([]byte, 64<<10)
		for n < 20*len(packet) {
			m, err := peer.Read(b)
			if n += m; err != nil {
				break
			}
		}
		read <- n
	}()
	if err := <-admitted; err != nil {
		t.Fatal(err)
	}
	if n := <-read; n != 20*len(packet) {
		t.Fatalf("%d bytes came", n)
	}
	go func() { admitted <- c.admit() }()
	c.end(ErrTimeout, true)
	if err := <-admitted; err != nil && !errors.Is(err, ErrTimeout) {
		t.Fatal(err)
	}
}

func TestAdmitEndsWithTheConnection(t *testing.T) {
	c, _, failed := pipe(t, Options{WriteTimeout: 200 * time.Millisecond})
	if _, err := c.Write(append([]byte{packetPublish << 4}, make([]byte, 20<<20)...)); err != nil {
		t.Fatal(err)
	}
	if err := c.admit(); !errors.Is(err, ErrTimeout) {
		t.Fatalf("%v", err)
	}
	if err := <-failed; !errors.Is(err, ErrTimeout) {
		t.Fatalf("%v", err)
	}
}

// A peer that takes a little now and then makes progress, even if no write ever ends within the limit.
func TestAWriteThatMovesDoesNotTimeOut(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs sendQueue")
	}
	const limit = time.Second // a busy machine stops a test for some tenths of one
	c, peer, failed := pipe(t, Options{WriteTimeout: limit})
	_ = peer.SetReadBuffer(8 << 10)
	_ = c.tcp.SetWriteBuffer(1 << 20) // the kernel takes more only when a third of it is free, which takes longer than limit
	if _, err := c.Write(append([]byte{packetPublish << 4}, make([]byte, 16<<20)...)); err != nil {
		t.Fatal(err)
	}
	for end, b := time.Now().Add(6*limit), make([]byte, 4<<10); time.Now().Before(end); time.Sleep(limit / 20) {
		if _, err := peer.Read(b); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
	select { // and now it does not move any more
	case err := <-failed:
		if !errors.Is(err, ErrTimeout) {
			t.Fatal(err)
		}
	case <-time.After(20 * limit):
		t.Fatal("a stalled write is not noticed")
	}
}

func TestTheFirstReasonWins(t *testing.T) {
	c, peer, failed := pipe(t, Options{})
	peer.Close()
	_, err := c.Read(make([]byte, 1))
	if !errors.Is(err, ErrPeerClosed) {
		t.Fatalf("read: %v", err)
	}
	c.Close()
	c.end(ErrTimeout, true)
	if _, err := c.Write([]byte{packetPingreq << 4, 0}); !errors.Is(err, ErrPeerClosed) {
		t.Fatalf("write: %v", err)
	}
	if err := <-failed; !errors.Is(err, ErrPeerClosed) || len(failed) > 0 {
		t.Fatalf("reported: %v", err)
	}
}

func TestClassify(t *testing.T) {
	wrap := func(err error) error { return &net.OpError{Op: "read", Net: "tcp", Err: err} }
	for err, want := range map[error]error{
		io.EOF:                              ErrPeerClosed,
		io.ErrUnexpectedEOF:                 ErrPeerClosed,
		wrap(syscall.ECONNRESET):            ErrPeerClosed,
		wrap(syscall.EPIPE):                 ErrPeerClosed,
		&websocket.CloseError{Code: 1001}:   ErrPeerClosed,
		wrap(os.ErrDeadlineExceeded):        ErrTimeout,
		wrap(syscall.ETIMEDOUT):             ErrTimeout,
		wrap(net.ErrClosed):                 ErrClosed,
		fmt.Errorf("write: %w", ErrTimeout): ErrTimeout,
		wrap(syscall.ENETUNREACH):           syscall.ENETUNREACH,
	} {
		got := classify("read", err)
		if !errors.Is(got, want) || strings.Contains(got.Error(), "use of closed") {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
		for _, other := range []error{ErrPeerClosed, ErrTimeout, ErrClosed} {
			if other != want && errors.Is(got, other) {
				t.Errorf("%v is also %v", err, other)
			}
		}
	}
}

// paho must not see the text of a closed socket: it takes it for a Disconnect of its own, and stays connected for ever.
func TestPahoSeesEveryEnd(t *testing.T) {
	c, _, _ := pipe(t, Options{})
	time.AfterFunc(20*time.Millisecond, c.abort)
	_, err := c.Read(make([]byte, 1))
	if !errors.Is(err, ErrClosed) || strings.Contains(err.Error(), "use of closed") {
		t.Fatalf("read: %v", err)
	}
}

func TestTheConnectPacketCarriesOurKeepAlive(t *testing.T) {
	for interval, want := range map[time.Duration]uint16{1: 1, time.Second: 1, 1500 * time.Millisecond: 2, 5 * time.Second: 5, 1000 * time.Hour: 65535} {
		for _, id := range []string{"c", string(make([]byte, 300))} { // with a length of one and of two bytes
			p := packets.NewControlPacket(packets.Connect).(*packets.ConnectPacket)
			p.ProtocolName, p.ProtocolVersion, p.ClientIdentifier, p.CleanSession = "MQTT", 4, id, true
			var b bytes.Buffer
			if err := p.Write(&b); err != nil {
				t.Fatal(err)
			}
			setKeepAlive(b.Bytes(), interval)
			got, err := packets.ReadPacket(&b)
			if err != nil {
				t.Fatal(err)
			}
			if q := got.(*packets.ConnectPacket); q.Keepalive != want || q.ClientIdentifier != id || !q.CleanSession || q.Validate() != packets.Accepted {
				t.Errorf("%s: %v", interval, q)
			}
		}
	}
}

func TestFramesAreFoundHoweverTheStreamIsCut(t *testing.T) {
	puback := []byte{packetPuback << 4, 2, 0, 7}
	var stream []byte
	stream = append(stream, packetConnack<<4, 2, 0, 5)
	want := 0
	for range 200 {
		switch rand.IntN(4) {
		case 0:
			stream, want = append(stream, puback...), want+1
		case 1:
			stream = append(stream, 0xd0, 0) // PINGRESP, an empty packet
		case 2: // a PUBLISH that looks like PUBACKs
			stream = append(append(stream, packetPublish<<4, 8), append(puback, puback...)...)
		case 3: // one with a length of two bytes
			stream = append(append(stream, packetPublish<<4, 0x80, 0x02), bytes.Repeat(puback, 64)...)
		}
	}
	for range 200 {
		var f frames
		var connack atomic.Int32
		got := 0
		for rest := stream; len(rest) > 0; {
			n := min(1+rand.IntN(9), len(rest))
			got += f.scan(rest[:n], &connack)
			rest = rest[n:]
		}
		if got != want || connack.Load() != 6 {
			t.Fatalf("%d PUBACKs, want %d; CONNACK %d, want 5", got, want, connack.Load()-1)
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{0x20, 2, 0, 0, 0x40, 2, 0, 1}, 3)
	f.Add([]byte{0x30, 0xff, 0xff, 0xff, 0xff, 0xff}, 1)
	f.Fuzz(func(t *testing.T, stream []byte, cut int) {
		var whole, parts frames
		var connack atomic.Int32
		cut = max(0, min(cut, len(stream)))
		a := whole.scan(stream, &connack)
		if b := parts.scan(stream[:cut], &connack) + parts.scan(stream[cut:], &connack); a != b || whole != parts {
			t.Fatalf("cut at %d: %d and %d", cut, a, b)
		}
	})
}
