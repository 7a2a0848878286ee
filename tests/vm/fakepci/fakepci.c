// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci.c - a PCI bus of its own with made-up devices, so that a driver that gives up without hardware stays.
 *
 * The first answers configuration reads as an NVSwitch of NVIDIA's would and has no memory behind it: nvidia.ko's
 * probe of it fails, and its module stays loaded with its character devices and resource manager. The second is there
 * if "memory" names a range of RAM that the kernel was told to leave alone. It has the IDs of an H100, and registers
 * that say which chip it is and nothing more: nvidia.ko lists it as a GPU, and fails when it is opened.
 */
#include <linux/io.h>
#include <linux/module.h>
#include <linux/numa.h>
#include <linux/pci.h>
#include <linux/sizes.h>

#define BUS	0x10
#define DOMAIN	1
#define IRQ	11	/* never raised, but the driver wants one */

/* Registers that tell the chip (dev_boot.h): an implementation-defined word, and architecture and revision. */
#define PMC_BOOT_0	0x0
#define PMC_BOOT_42	0xa00
#define GH100_BOOT_0	0x180000a1
#define GH100_BOOT_42	0x180a1000

static ulong memory;
module_param(memory, ulong, 0);
MODULE_PARM_DESC(memory, "physical address of 32 MiB of reserved RAM for the GPU's registers and memory; 0: no GPU");

struct device_config {
	u8 bytes[256];
	u64 sizes[3];	/* of its 64-bit address registers; 0: it has none */
};

static struct device_config config[2] = {
	[1].sizes = { SZ_16M, SZ_8M, SZ_8M },	/* registers, memory, and the part of it that RM maps for itself */
};
static struct pci_bus *bus;
static struct pci_sysdata sysdata = { .domain = DOMAIN, .node = NUMA_NO_NODE };
static struct resource numbers = { .name = "fakepci", .start = BUS, .end = BUS, .flags = IORESOURCE_BUS };
static struct resource window = { .name = "fakepci", .flags = IORESOURCE_MEM };

static struct device_config *config_of(const struct pci_bus *at, unsigned int devfn, int where, int size)
{
	unsigned int slot = PCI_SLOT(devfn);

	if (at->number != BUS || PCI_FUNC(devfn) || slot >= (memory ? 2 : 1) || where + size > sizeof(config->bytes))
		return NULL;
	return &config[slot];
}

static int read_config(struct pci_bus *at, unsigned int devfn, int where, int size, u32 *value)
{
	struct device_config *device = config_of(at, devfn, where, size);

	*value = ~0;
	if (!device)
		return PCIBIOS_DEVICE_NOT_FOUND;
	*value = 0;
	memcpy(value, device->bytes + where, size);
	return PCIBIOS_SUCCESSFUL;
}

static void put_bar(struct device_config *device, int i, u64 address)
{
	address |= PCI_BASE_ADDRESS_MEM_TYPE_64 | PCI_BASE_ADDRESS_MEM_PREFETCH;
	memcpy(device->bytes + PCI_BASE_ADDRESS_0 + 8 * i, &address, sizeof(address));
}

/* Only command, status and addresses may be written. A register keeps no bits below its size, by which it is sized. */
static int write_config(struct pci_bus *at, unsigned int devfn, int where, int size, u32 value)
{
	struct device_config *device = config_of(at, devfn, where, size);
	int i = (where - PCI_BASE_ADDRESS_0) / 8;
	u64 address;

	if (!device)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where == PCI_COMMAND) {
		memcpy(device->bytes + where, &value, min(size, 2));
	} else if (where >= PCI_BASE_ADDRESS_0 && i < ARRAY_SIZE(device->sizes) && device->sizes[i] && size == 4) {
		memcpy(device->bytes + where, &value, size);
		memcpy(&address, device->bytes + PCI_BASE_ADDRESS_0 + 8 * i, sizeof(address));
		put_bar(device, i, address & ~(device->sizes[i] - 1));
	}
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops ops = { .read = read_config, .write = write_config };

static void identify(struct device_config *device, u16 id, u16 subsystem, u16 class)
{
	const u16 words[][2] = {
		{ PCI_VENDOR_ID, PCI_VENDOR_ID_NVIDIA },
		{ PCI_DEVICE_ID, id },
		{ PCI_SUBSYSTEM_VENDOR_ID, PCI_VENDOR_ID_NVIDIA },
		{ PCI_SUBSYSTEM_ID, subsystem },
		{ PCI_CLASS_DEVICE, class },
	};
	int i;

	for (i = 0; i < ARRAY_SIZE(words); i++)
		memcpy(device->bytes + words[i][0], &words[i][1], sizeof(u16));
	device->bytes[PCI_REVISION_ID] = 0xa1;
	device->bytes[PCI_INTERRUPT_PIN] = 1;
	device->bytes[PCI_INTERRUPT_LINE] = IRQ;
}

static int make_gpu(struct device_config *device)
{
	void __iomem *registers = ioremap(memory, SZ_4K);
	u64 at = memory;
	int i;

	if (!registers)
		return -ENOMEM;
	memset_io(registers, 0, SZ_4K);
	writel(GH100_BOOT_0, registers + PMC_BOOT_0);
	writel(GH100_BOOT_42, registers + PMC_BOOT_42);
	iounmap(registers);
	identify(device, 0x2330, 0x16c1, PCI_CLASS_DISPLAY_3D);
	for (i = 0; i < ARRAY_SIZE(device->sizes); i++) {
		put_bar(device, i, at);
		at += device->sizes[i];
	}
	window.start = memory;
	window.end = at - 1;
	return 0;
}

static int __init fakepci_init(void)
{
	LIST_HEAD(resources);
	struct pci_dev *dev;
	int ret;

	identify(&config[0], 0x22a3, 0x1796, PCI_CLASS_BRIDGE_OTHER);
	pci_add_resource(&resources, &numbers);
	if (memory) {
		ret = make_gpu(&config[1]);
		if (ret)
			return ret;
		pci_add_resource(&resources, &window);
	}
	bus = pci_scan_root_bus(NULL, BUS, &ops, &sysdata, &resources);
	if (!bus)
		return -ENODEV;
	pci_bus_claim_resources(bus);
	list_for_each_entry(dev, &bus->devices, bus_list)
		dev->irq = IRQ;
	pci_bus_add_devices(bus);
	return 0;
}

static void __exit fakepci_exit(void)
{
	pci_lock_rescan_remove();
	pci_stop_root_bus(bus);
	pci_remove_root_bus(bus);
	pci_unlock_rescan_remove();
}

module_init(fakepci_init);
module_exit(fakepci_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("qgpu test bed: a made-up PCI bus");
